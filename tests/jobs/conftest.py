"""A state of its own for each test on the shared Redis: the prefix of its keys is fresh. A client, the
command, and an S3 server that fails on demand."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill.jobs import options
from pagemill.jobs.cli import main
from pagemill.jobs.client import Client
from pagemill.jobs.state import State

sys.path.insert(0, str(Path(__file__).parent / "support"))

from command_line import Result, Run
from fake_worker import unique
from faults.s3_proxy import FaultyS3


@pytest.fixture
async def state(redis_url: str) -> AsyncIterator[State]:
    opened = await State.connect(redis_url, prefix=f"test-{uuid.uuid4().hex[:12]}")
    yield opened
    await opened.close()


@pytest.fixture
async def client(redis_url: str, tmp_path: Path) -> AsyncIterator[Client]:
    async with Client(redis_url, str(tmp_path / "store")) as opened:
        yield opened


@pytest.fixture
def model() -> str:
    return unique("model")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def run(
    redis_url: str, store: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Run:
    """The program in this process, with variables as a user would set them."""
    monkeypatch.setenv("PAGEMILL_REDIS_URL", redis_url)
    monkeypatch.setenv("PAGEMILL_STORE", str(store))
    monkeypatch.delenv("PAGEMILL_DEBUG", raising=False)
    monkeypatch.setattr(options, "PATIENCE_S", 0.2)

    def call(*words: object) -> Result:
        capsysbinary.readouterr()
        code = main([str(word) for word in words])
        said = capsysbinary.readouterr()
        return Result(code, said.out.decode(), said.err.decode())

    return call


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "one", "id": "a"}\nnot json\n\n{"messages": [{"role": "user", "content": "two"}]}\n'
    )
    return file


@pytest.fixture
def faulty(s3: Any) -> Iterator[FaultyS3]:
    assert s3.endpoint is not None
    with FaultyS3(s3.endpoint) as server:
        yield server
