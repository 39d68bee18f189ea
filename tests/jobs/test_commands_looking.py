"""Commands that look: a status in OpenAI's words, workers and jobs as tables; and tables as input."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_worker import say_alive, unique, work
from openai.types import Batch

from pagemill.jobs.cli import main
from pagemill.jobs.client import Client

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    monkeypatch.setenv("PAGEMILL_REDIS_URL", redis_url)
    monkeypatch.setenv("PAGEMILL_STORE", str(tmp_path / "store"))

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_csv_file_from_submission_to_openai_s_status(call: Call, redis_url: str, tmp_path: Path) -> None:
    model = unique("model")
    (tmp_path / "t.csv").write_text('key,text\nk1,one\nk2,"two, three"\nk3\n')
    words = ("--model", model, "--template", "Say {text}", "--id-column", "key")
    code, out, err = call("submit", tmp_path / "t.csv", *words)
    assert code == 0, err
    job = out.strip()
    waiting = Batch.model_validate_json(call("status", job, "--format", "openai")[1])
    assert waiting.status == "validating"

    async def finish() -> None:
        async with Client(redis_url, str(tmp_path / "store")) as client:
            await work(await client.state(), client.storage, model)

    asyncio.run(finish())
    done = Batch.model_validate_json(call("status", job, "--format", "openai")[1])
    assert done.request_counts is not None
    assert (done.status, done.request_counts.failed) == ("completed", 1)
    lines = call("results", job)[1].splitlines()
    assert lines[:2] == ["0\tk1\tcompleted\tanswer to Say one", "1\tk2\tcompleted\tanswer to Say two, three"]
    assert "1 cell, and the header 2" in lines[2]
    assert json.loads(call("status", job, "--format", "json")[1]) == json.loads(
        call("status", job, "--json")[1]
    )
    code, _, err = call("status", job, "--json", "--format", "openai")
    assert (code, "does not go with openai" in err) == (2, True)


def test_columns_go_with_tables(call: Call, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "x"}\n')
    code, _, err = call("submit", tmp_path / "t.jsonl", "-m", "m", "--prompt-column", "prompt")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "taken for JSONL" in err


def test_workers_are_listed(call: Call, redis_url: str, tmp_path: Path) -> None:
    model = unique("model")
    code, out, err = call("workers", "--model", model)
    assert (code, out) == (0, "")
    assert "pagemill worker --model" in err

    async def alive() -> str:
        async with Client(redis_url, str(tmp_path / "store")) as client:
            return await say_alive(await client.state(), model)

    name = asyncio.run(alive())
    head, line = call("workers", "-m", model)[1].splitlines()
    assert head.split("\t")[:3] == ["worker", "state", "model"]
    assert line.split("\t")[:3] == [name, "ready", model]
    (shown,) = json.loads(call("workers", "-m", model, "--json")[1])
    assert (shown["worker"], shown["models"]) == (name, [model])
