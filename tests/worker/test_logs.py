"""The worker's log: one line an event, in either form."""

from __future__ import annotations

import errno
import io
import json
import logging
from collections.abc import Iterator

import pytest

from pagemill.worker.logs import set_up_logging


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
