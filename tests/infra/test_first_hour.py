"""A newcomer's first hour, as the READMEs tell it: each block is taken from its document and run whole, by a
shell, beside real servers. The simulated engine stands in for models that nobody has here."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill.jobs.reading import Results
from pagemill.jobs.storage import open_storage

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = '{"prompt": "one"}\nnot json\n{"prompt": "two"}\n'


def block(document: str, kind: str, words: str) -> str:
    """The block of a document that holds these words."""
    blocks: list[str] = re.findall(
        rf"^```{kind}\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL
    )
    (found,) = (text for text in blocks if words in text)
    return found


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Where the READMEs' commands are typed: a checkout with its .venv, one's own file, and two models."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    (tmp_path / "infra").symlink_to(ROOT / "infra")
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    (tmp_path / "Llama-3.2-1B-Instruct").mkdir()
    (tmp_path / "Llama-3.2-1B-Instruct" / "config.json").write_text("{}")
    (tmp_path / "demo.gguf").touch()
    return tmp_path


@pytest.fixture
def env(checkout: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PAGEMILL_", "AWS_"))}
    return kept | {
        "HOME": str(checkout),
        "PAGEMILL_ENGINE": "simulated",
        "PAGEMILL_LEASE_TTL_S": "1",
        "PAGEMILL_DEMO_MODEL": str(checkout / "demo.gguf"),
    }


def bash(script: str, checkout: Path, env: dict[str, str], *before: str) -> subprocess.CompletedProcess[str]:
    (checkout / "typed.sh").write_text(f"set -e\n{script}")
    words = [*before, "bash", "typed.sh"]
    return subprocess.run(words, cwd=checkout, env=env, capture_output=True, text=True, timeout=240)


def test_a_file_of_one_s_own_on_one_machine(checkout: Path, env: dict[str, str]) -> None:
    """`pagemill run` with the demo model and with a folder, then each kind of results."""
    lines = block("README.md", "sh", "pagemill run prompts.jsonl").splitlines()
    runs = [line for line in lines if not line.startswith("pagemill results")]
    done = bash("\n".join(runs), checkout, env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 completed, 1 failed, of 3") == 2
    stores = [checkout / name for name in ("answers", "llama-answers")]
    jobs = [path.name for store in stores for path in (store / "jobs").iterdir()]
    for store, job in zip(stores, jobs, strict=True):
        rows = Results(open_storage(store), job).list()
        assert [row.status for row in rows] == ["completed", "failed", "completed"]
    reads = "\n".join(line for line in lines if line not in runs).replace("JOB", jobs[0])
    done = bash(f". .venv/bin/activate\n{reads}", checkout, env)
    assert done.returncode == 0, done.stderr
    assert "0\trow-0\tcompleted\t" in done.stdout
    with (checkout / "answers.csv").open(newline="") as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["completed", "failed", "completed"]
    answers, errors = (checkout / f"answers{middle}.jsonl" for middle in ("", ".errors"))
    assert [len(path.read_text().splitlines()) for path in (answers, errors)] == [2, 1]


def test_two_workers_and_a_bucket_on_one_machine(
    checkout: Path, env: dict[str, str], redis_server: Any, s3: Any
) -> None:
    """The servers are the tests' own, which `infra/servers.py` takes as it would start others."""
    text = block("infra/README.md", "sh", "python infra/servers.py -- bash")
    activate, servers, *typed = text.splitlines()
    assert activate == ". .venv/bin/activate"
    assert servers.startswith("python infra/servers.py -- bash ")
    given = {
        "PAGEMILL_TEST_REDIS_URL": redis_server.url,
        "PAGEMILL_TEST_S3_URL": s3.url,
        "PAGEMILL_TEST_S3_ENDPOINT": s3.endpoint,
        "PAGEMILL_TEST_S3_REGION": s3.region,
        "PAGEMILL_TEST_S3_ACCESS_KEY": s3.access_key,
        "PAGEMILL_TEST_S3_SECRET_KEY": s3.secret_key,
    }
    env |= {name: value for name, value in given.items() if value}
    script = "\n".join([activate, *typed])
    done = bash(script, checkout, env, sys.executable, "infra/servers.py", "--")
    assert done.returncode == 0, done.stderr
    assert "40 completed, 7 failed, of 47" in done.stdout
    assert done.stderr.count(" has left") == 2
    storage = open_storage(f"{s3.url}/prefix", s3.options)
    (manifest,) = (info.key for info in storage.list("jobs/") if info.key.endswith("manifest.json"))
    assert len(Results(storage, manifest.split("/")[1]).list()) == 47


@pytest.fixture
def served(redis_url: str, checkout: Path, env: dict[str, str]) -> Iterator[str]:
    """The name of a model that a worker of its own serves."""
    model = f"llama-{uuid.uuid4().hex[:8]}"
    env |= {"PAGEMILL_REDIS_URL": redis_url, "PAGEMILL_STORE": str(checkout / "store")}
    worker = subprocess.Popen(
        [sys.executable, "-m", "pagemill.worker.main"],
        env=env | {"PAGEMILL_MODEL": model},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield model
    finally:
        worker.terminate()
        assert worker.wait(timeout=30) == 0


def test_the_same_from_python(checkout: Path, env: dict[str, str], served: str) -> None:
    program = block("README.md", "python", "SyncClient").replace('"llama"', repr(served))
    for address in ("redis://redis:6379/0", "s3://bucket/prefix"):
        assert f'"{address}"' in program
    program = re.sub(r'SyncClient\("redis.*?"\)', "SyncClient()", program)
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=checkout, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(" ")[:2] for line in done.stdout.splitlines()] == [
        ["0", "completed"],
        ["1", "completed"],
    ]
