"""Whatever is raised ends as one sentence and an exit code."""

from __future__ import annotations

import asyncio
import errno

import pytest
from redis.exceptions import AuthenticationError, ConnectionError, OutOfMemoryError, ResponseError

from pagemill.jobs.errors import JobNotFound, ModelError, PagemillError, StorageError
from pagemill.jobs.failures import Interrupted, describe, interruptible, report


@pytest.mark.parametrize(
    ("error", "words", "code"),
    [
        (JobNotFound("There is\nno job."), "There is no job.", 3),
        (StorageError("The store\trefuses."), "The store refuses.", 5),
        (ModelError("No model."), "No model.", 7),
        (ConnectionError("Error 111 connecting"), "does not answer", 6),
        (AuthenticationError("WRONGPASS"), "credentials", 6),
        (OutOfMemoryError("OOM"), "full", 6),
        (ResponseError("something else"), "something else", 6),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "disk is full: /data/x", 5),
        (OSError(errno.EADDRINUSE, "Address already in use"), "port is in use", 2),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a.jsonl"), "a.jsonl", 2),
        (BrokenPipeError(), "", 141),
        (KeyboardInterrupt(), "Interrupted", 130),
        (ImportError("No module named 'x'"), "missing", 1),
        (MemoryError(), "memory", 1),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero", 1),
        (ExceptionGroup("several", [StorageError("first.")]), "first.", 5),
        (PagemillError("x" * 5000), "xxx", 1),
    ],
)
def test_every_error_is_a_sentence_and_a_code(error: BaseException, words: str, code: int) -> None:
    sentence, exit_code = describe(error)
    assert exit_code == code
    assert words in sentence
    assert "\n" not in sentence
    assert len(sentence) <= 1000


def test_a_traceback_is_shown_only_when_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEMILL_DEBUG", raising=False)
    assert report(ValueError("odd")) == 1
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("PAGEMILL_DEBUG", "1")
    try:
        raise ValueError("odd")
    except ValueError as error:
        report(error)
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_says_how_to_get_back() -> None:
    for kind in (KeyboardInterrupt, asyncio.CancelledError):
        with pytest.raises(Interrupted, match="watch it again") as caught, interruptible("watch it again"):
            raise kind
        assert caught.value.exit_code == 130
