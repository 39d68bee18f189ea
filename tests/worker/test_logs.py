"""The worker's log: one line an event, in either form."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
from collections.abc import Iterator

import pytest

from pagemill.worker.logs import about, about_row, set_up_logging


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("pagemill")
    before = (root.handlers[:], root.level, ours.level, logging.getLogger("arq").level)
    told = logging.raiseExceptions
    yield
    logging.raiseExceptions = told
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])
    logging.getLogger("arq").setLevel(before[3])


def test_json_lines_hold_an_exception_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "json")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("pagemill.worker").exception("it failed: %d", 3)
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["message"]) == ("error", "it failed: 3")
    assert "ValueError: no" in entry["exception"]


class Full(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_that_cannot_be_written_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "text")
    handler = logging.getLogger().handlers[0]
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(Full())
    logging.getLogger("pagemill.worker").info("hello")
    assert capsys.readouterr().err == ""


def test_libraries_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "text")
    logging.getLogger("arq.worker").warning("shutdown")
    logging.getLogger("botocore").info("endpoint")
    logging.getLogger("pagemill.engine").info("ready")
    assert capsys.readouterr().err.splitlines()[0].endswith("pagemill.engine  ready")


async def test_a_line_knows_its_job_and_shard_wherever_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "json", worker="w1")
    log = logging.getLogger("pagemill.worker")
    with about(job="j", task="shard:3", shard=3):
        await asyncio.gather(asyncio.to_thread(log.info, "from a thread"), _said(log))
        with about(row=7):
            log.info("of a row")
    log.info("of nothing")
    log.info("by hand", extra=about_row("j2/4/000001.5/9"))
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    found = {line["message"]: {name: line.get(name) for name in ("job", "shard", "row")} for line in lines}
    assert found["from a thread"] == found["from a task"] == {"job": "j", "shard": 3, "row": None}
    assert found["of a row"] == {"job": "j", "shard": 3, "row": 7}
    assert found["of nothing"] == {"job": None, "shard": None, "row": None}
    assert found["by hand"] == {"job": "j2", "shard": 4, "row": 9}
    assert {line["worker"] for line in lines} == {"w1"}


async def _said(log: logging.Logger) -> None:
    log.info("from a task")


@pytest.mark.parametrize("rid", ["", "canary", "j/x/f/1", "j/1/f/1/canary"])
def test_an_id_that_is_no_row_s_says_nothing(rid: str) -> None:
    assert about_row(rid) == {}


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_secret_is_in_a_line_whoever_wrote_it(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", form, secrets=["hushhush"])  # type: ignore[arg-type]
    try:
        raise OSError("cannot reach redis://me:quiet@host with hushhush")
    except OSError:
        logging.getLogger("botocore").exception("key %s at %s", "hushhush", "http://k:quiet@s3:9000")
    said = capsys.readouterr().err
    assert "hushhush" not in said
    assert "quiet" not in said
    assert "***@host" in said
