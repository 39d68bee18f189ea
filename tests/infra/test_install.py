"""What `pip install .` alone gives: a client that submits, polls and reads results, with no torch about."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(420)

SCRIPT = """
import asyncio, importlib.util, json, sys
from pagemill.jobs import Client

assert importlib.util.find_spec("torch") is None, "this environment was to be without torch"

async def main(redis_url, store, model):
    async with Client(redis_url, store) as client:
        job = await client.submit(["one", "two", "three"], model=model, max_tokens=4)
        status = await client.wait(job)
        rows = [(row.row_index, row.status, bool(row.text)) async for row in client.results(job)]
        print(json.dumps({"job": job.id, "state": status.state, "rows": rows}))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment that holds the wheel of this checkout and no extra."""
    place = tmp_path_factory.mktemp("light")
    # A copy, since pip builds in place, and what it leaves there would get into the next wheel.
    source = place / "source"
    for part in ("jobs", "kernels", "engine", "worker"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source)
    venv.create(place / "env", with_pip=True)
    python = place / "env" / "bin" / "python"
    words = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(source)]
    installed = subprocess.run(words, capture_output=True, text=True, cwd=place)
    assert installed.returncode == 0, installed.stderr
    return python


def run(light: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """In an empty folder, so that nothing is imported from the checkout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(light.parent / words[0]), *words[1:]],
        capture_output=True,
        text=True,
        cwd=light.parents[2],
        env=env | settings,
        timeout=120,
    )


@pytest.fixture
def simulated_model(redis_url: str, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A worker of the full environment, and the names (model, store) under which it works."""
    model, store = f"sim-{uuid.uuid4().hex[:8]}", str(tmp_path / "store")
    env = os.environ | {
        "PAGEMILL_REDIS_URL": redis_url,
        "PAGEMILL_STORE": store,
        "PAGEMILL_ENGINE": "simulated",
    }
    tool = Path(sys.executable).parent / "pagemill"
    worker = subprocess.Popen([tool, "worker", "--model", "simulated", "--name", model], env=env)
    try:
        yield model, store
    finally:
        worker.terminate()
        assert worker.wait(timeout=30) == 0


def test_the_wheel_alone_submits_polls_and_reads_results(
    light: Path, redis_url: str, simulated_model: tuple[str, str]
) -> None:
    model, store = simulated_model
    outcome = run(light, "python", "-W", "error", "-c", SCRIPT, redis_url, store, model)
    assert outcome.returncode == 0, outcome.stderr
    said = json.loads(outcome.stdout)
    assert said["state"] == "completed"
    assert said["rows"] == [[i, "completed", True] for i in range(3)]

    settings = {"PAGEMILL_REDIS_URL": redis_url, "PAGEMILL_STORE": store}
    status = run(light, "pagemill", "status", said["job"], "--json", **settings)
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["completed"] == 3
    results = run(light, "pagemill", "results", said["job"], "--format", "jsonl", **settings)
    assert [json.loads(line)["row_index"] for line in results.stdout.splitlines()] == [0, 1, 2]


@pytest.mark.parametrize(
    "words", [("run", "x.jsonl", "--model", "m", "--output", "o"), ("worker", "--model", "m"), ("doctor",)]
)
def test_commands_of_the_worker_say_which_extra_they_need(light: Path, words: tuple[str, ...]) -> None:
    (light.parents[2] / "x.jsonl").write_text('{"prompt": "x"}\n')
    outcome = run(light, "pagemill", *words)
    assert outcome.returncode != 0
    assert "pip install 'pagemill[" in outcome.stderr + outcome.stdout
    assert "Traceback" not in outcome.stderr + outcome.stdout
