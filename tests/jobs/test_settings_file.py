"""One order for every setting: flags, variables, the file, defaults; and a file's mistakes are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pagemill.jobs.errors import UsageError
from pagemill.jobs.settings import ClientSettings
from pagemill.worker.settings import WorkerSettings

Write = Callable[[str], Path]


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Write:
    """Makes the file that PAGEMILL_CONFIG names, with no other variable set."""
    for name in (*WorkerSettings.model_fields, "config"):
        monkeypatch.delenv(f"PAGEMILL_{name.upper()}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def make(text: str) -> Path:
        path = tmp_path / "pagemill.toml"
        path.write_text(text)
        monkeypatch.setenv("PAGEMILL_CONFIG", str(path))
        return path

    return make


def test_flags_go_over_variables_over_the_file_over_defaults(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert WorkerSettings.load().slots is None
    write("[worker]\nslots = 3")
    assert WorkerSettings.load().slots == 3
    monkeypatch.setenv("PAGEMILL_SLOTS", "4")
    assert WorkerSettings.load().slots == 4
    assert WorkerSettings.load(slots=5).slots == 5


def test_a_client_and_a_worker_share_the_top_of_one_file(write: Write) -> None:
    write(
        'redis_url = "rediss://r/1"\nstore = "s3://b/p"\n'
        '[worker]\nmodels = ["a=./a", "b=./b"]\nlease_ttl_s = 5'
    )
    client, worker = ClientSettings.load(), WorkerSettings.load()
    assert client.redis_url == worker.redis_url == "rediss://r/1"
    assert client.store == "s3://b/p"
    assert [choice.name for choice in worker.choices] == ["a", "b"]
    assert worker.lease_ttl_s == 5


def test_one_model_named_nearer_takes_the_place_of_several(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write('[worker]\nmodels = ["a=./a", "b=./b"]')
    assert WorkerSettings.load(model="c").model_name == "c"
    monkeypatch.setenv("PAGEMILL_MODEL", "d")
    assert WorkerSettings.load().model_name == "d"
    monkeypatch.setenv("PAGEMILL_MODELS", "e,f")
    assert WorkerSettings.load(model="g").model_name == "g"


def test_the_usual_place_is_in_the_home_folder_and_not_in_the_working_directory(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".pagemill").mkdir()
    (tmp_path / ".pagemill" / "config.toml").write_text('store = "s3://home"')
    (tmp_path / "config.toml").write_text('store = "s3://stranger"')
    monkeypatch.chdir(tmp_path)
    assert ClientSettings.load().store == "s3://home"
    write('store = "s3://named"')
    assert ClientSettings.load().store == "s3://named"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slots = 3", "slots is no setting here"),
        ("[worker]\nsolts = 3", r"\[worker\] solts is no setting here; there are .*slots"),
        ('[worker]\nslots = "many"', "pagemill.toml: slots must be a whole number from 1 to 64"),
        ("redis_url = ", "pagemill.toml cannot be read"),
        ("worker = 3", "worker is a table"),
        (
            'redis_url = "http://me:hushhush@x"',
            r"pagemill.toml: redis_url: 'http://\*\*\*@x' is not a Redis address",
        ),
    ],
)
def test_a_file_s_mistakes_are_named_with_their_place(write: Write, text: str, said: str) -> None:
    write(text)
    with pytest.raises(UsageError, match=said):
        WorkerSettings.load()


def test_a_file_that_is_named_must_be_there(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_CONFIG", "/nowhere/pagemill.toml")
    with pytest.raises(UsageError, match="PAGEMILL_CONFIG names /nowhere"):
        ClientSettings.load()


def test_keys_in_the_file_are_as_secret_as_elsewhere(write: Write) -> None:
    write('s3_access_key = "me"\ns3_secret_key = "hushhush"\nredis_url = "redis://u:quiet@h/0"')
    settings = ClientSettings.load()
    assert settings.storage_options().secret_key == "hushhush"
    assert settings.secrets() >= {"hushhush", "quiet"}
    assert "hushhush" not in repr(settings)
