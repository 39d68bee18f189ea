"""`infra/demo`, the first command that anybody runs: a first time, again, after an interruption, after an
older one. Everything in it is real but the model, which the simulated engine does without."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pagemill.jobs.reading import Results
from pagemill.jobs.storage import open_storage

ROOT = Path(__file__).resolve().parents[2]
LINES = 30
Demo = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose .venv is up to date, with a demo of its own."""
    (tmp_path / "infra").mkdir()
    for name in ("setup.sh", "model.py"):
        (tmp_path / "infra" / name).symlink_to(ROOT / "infra" / name)
    shutil.copy(ROOT / "infra" / "demo", tmp_path / "infra")  # it works where it lies
    (tmp_path / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    (tmp_path / "model.gguf").touch()
    prompts(tmp_path, LINES)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    program = "import sys; from pagemill.jobs.cli import main; sys.exit(main())"
    for name, words in (
        ("python", f"'{sys.executable}'"),
        ("pagemill", f"'{sys.executable}' -c '{program}'"),
    ):
        (programs / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (programs / name).chmod(0o755)
    want = subprocess.run(["cksum"], input=(ROOT / "pyproject.toml").read_bytes(), capture_output=True)
    (programs.parent / ".pagemill-worker,embedded").write_bytes(want.stdout)
    return tmp_path


def prompts(checkout: Path, count: int) -> None:
    lines = (f'{{"prompt": "row {i}"}}\n' for i in range(count))
    (checkout / "infra" / "demo.jsonl").write_text("".join(lines))


@pytest.fixture
def demo(checkout: Path) -> Demo:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    env |= {"HOME": str(checkout), "PAGEMILL_ENGINE": "simulated", "PAGEMILL_LEASE_TTL_S": "1"}
    env |= {
        "PAGEMILL_DEMO_MODEL": str(checkout / "model.gguf"),
        "PAGEMILL_SIM_LOG": str(checkout / "computed"),
    }

    def begin(**variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [checkout / "infra" / "demo"], env=env | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return begin


def ended(process: subprocess.Popen[str], checkout: Path) -> tuple[str, str]:
    """The job of a demo that ran to its end, and what it said meanwhile."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    (job,) = (path.name for path in (checkout / "out" / "demo" / "jobs").iterdir())
    assert job in out
    return job, err


def interrupted(demo: Demo, checkout: Path) -> str:
    """The job of a demo that was killed with rows put away; its folder stays."""
    process = demo(PAGEMILL_SIM_ROWS_PER_SECOND="20", PAGEMILL_SEAL_ROWS="3", PAGEMILL_SEAL_SECONDS="0.1")
    deadline = time.monotonic() + 60
    while not list(checkout.glob("out/demo/jobs/*/_work/*/*.parquet")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)  # the script is the program by now
    process.communicate(timeout=60)
    (job,) = (path.name for path in (checkout / "out" / "demo" / "jobs").iterdir())
    return job


def test_a_demo_that_was_cut_off_goes_on_and_one_that_ended_is_run_anew(demo: Demo, checkout: Path) -> None:
    job = interrupted(demo, checkout)
    again, err = ended(demo(), checkout)
    assert again == job
    assert f"Going on with job {job}" in err
    assert len(Results(open_storage(checkout / "out" / "demo"), job).list()) == LINES
    anew, _ = ended(demo(), checkout)
    assert anew != job


def test_a_cut_off_demo_of_other_prompts_makes_room(demo: Demo, checkout: Path) -> None:
    job = interrupted(demo, checkout)
    prompts(checkout, LINES + 1)
    again, err = ended(demo(), checkout)
    assert again != job
    assert "it is run anew" in err
    assert len(Results(open_storage(checkout / "out" / "demo"), again).list()) == LINES + 1
