"""Any exception as one sentence and an exit code, for programs that people run. Never a traceback.

Exit codes: 0 done, 1 something unforeseen, 2 asked for wrongly, 3 no such job, 4 conflict, 5 storage, 6
Redis, 7 model, 8 protocol, 9 the job failed, 130 interrupted, 141 the reader of our output went away.
PAGEMILL_DEBUG=1 shows where an error was raised. This room may not know which command is running.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)

from pagemill.jobs.errors import PagemillError, RedisUnavailable, StorageError
from pagemill.jobs.redaction import without_password

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

EXIT_CODES = (
    "Exit codes: 0 done; 1 unforeseen; 2 asked for wrongly; 3 no such job; 4 conflict with what exists; "
    "5 storage; 6 Redis; 7 model; 8 protocol version; 9 the job failed; 130 interrupted; 141 output closed."
)


class Interrupted(PagemillError):
    """Ctrl-C or SIGTERM; the sentence says what goes on without us and how to get back."""

    exit_code = INTERRUPTED


@contextmanager
def interruptible(sentence: str) -> Iterator[None]:
    """Within the block, Ctrl-C ends the command with this sentence."""
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise Interrupted(sentence) from None


@contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """Within the block, Ctrl-C and SIGTERM cancel the current task; a second one ends the process.

    The loop calls these handlers between the steps of its tasks. asyncio's own is called in the middle of
    one, and a cancel that a task has not met yet when it enters a `timeout(0)` is taken for the timeout's:
    redis-py enters one before most commands.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    asked = False

    def stop() -> None:
        nonlocal asked
        if asked or task is None:
            os._exit(INTERRUPTED)
        asked = True
        task.cancel()

    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        for number in signals:
            loop.add_signal_handler(number, stop)
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or a system without them
        yield
        return
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def report(error: BaseException) -> int:
    """Tell a person what went wrong, on stderr; returns the exit code."""
    sentence, code = describe(error)
    if os.environ.get("PAGEMILL_DEBUG"):
        print(without_password("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    if code == BROKEN_PIPE:
        # Whatever is still buffered must not be flushed into the closed pipe when the interpreter ends.
        _discard_stdout()
    elif sentence:
        print(f"pagemill: {without_password(sentence)}", file=sys.stderr)
    return code


def describe(error: BaseException) -> tuple[str, int]:
    """The sentence (empty: nothing to say) and the exit code of any exception."""
    if isinstance(error, PagemillError):
        return one_line(str(error)), error.exit_code
    if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
        return "Interrupted.", INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return "", BROKEN_PIPE
    if isinstance(error, RedisError):
        return _redis_sentence(error), RedisUnavailable.exit_code
    if isinstance(error, OSError):
        return _os_sentence(error)
    if isinstance(error, ImportError):
        return f"A library is missing or broken: {one_line(str(error))}.", 1
    if isinstance(error, MemoryError):
        return "This machine has no memory left for it.", 1
    if isinstance(error, BaseExceptionGroup):
        return describe(error.exceptions[0])
    said = one_line(str(error))
    kind = type(error).__name__
    return f"Unforeseen {kind}{': ' if said else ''}{said} (PAGEMILL_DEBUG=1 shows where).", 1


def one_line(text: str) -> str:
    """The text without line breaks, and not longer than a screen."""
    flat = " ".join(text.split())
    return flat if len(flat) <= 1000 else flat[:997] + "..."


def _redis_sentence(error: RedisError) -> str:
    said = one_line(str(error))
    # A ConnectionError comes first in most of these families, so the particular ones are asked before it.
    if isinstance(error, AuthenticationError):
        return f"Redis refused the credentials ({said}); put user and password into PAGEMILL_REDIS_URL."
    if isinstance(error, BusyLoadingError):
        return "Redis is loading its data; try again in a moment."
    if isinstance(error, ConnectionError | TimeoutError):
        return f"Redis does not answer ({said}); is it running, and is PAGEMILL_REDIS_URL right?"
    if isinstance(error, OutOfMemoryError):
        return "Redis is full (maxmemory); give it more memory, it must not evict."
    if isinstance(error, ReadOnlyError):
        return "This Redis is a read-only replica; name the primary."
    if isinstance(error, NoPermissionError):
        return f"Redis does not let this user do that ({said})."
    return f"Redis refused: {said}."


def _os_sentence(error: OSError) -> tuple[str, int]:
    where = f": {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"The disk is full{where}; free some space and run the same command again.",
            StorageError.exit_code,
        )
    if error.errno == errno.EADDRINUSE:
        return "The port is in use by another program; choose another one.", 2
    if error.errno == errno.EPIPE:
        return "", BROKEN_PIPE
    said = error.strerror or one_line(str(error)) or type(error).__name__
    return f"{said}{where}.", 2 if error.filename else 1


def _discard_stdout() -> None:
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # stdout is no real file (captured by a test)
        return
