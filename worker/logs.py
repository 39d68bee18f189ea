"""The worker's log: one line an event, as text or as JSON, to stderr. Prompts and answers are never in it.

What a line is about (job, shard, row) is said once, by whoever runs a task, and goes with everything that is
logged within it: also from its threads and the tasks that it starts. Secrets are taken out of every line,
whoever wrote it; this room may not know where they come from.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Literal

from pagemill.jobs.redaction import Redactor

FIELDS: Final = ("worker", "job", "task", "shard", "row")
_about: ContextVar[dict[str, str | int]] = ContextVar("about", default={})  # noqa: B039 (never changed in place)


@contextmanager
def about(**fields: str | int | None) -> Iterator[None]:
    """Within the block, lines say that they are about this: of FIELDS; None is left out."""
    known = {name: value for name, value in fields.items() if value is not None}
    token = _about.set({**_about.get(), **known})
    try:
        yield
    finally:
        _about.reset(token)


def about_row(rid: str) -> dict[str, str | int]:
    """What a row's id in the engine (job/shard/fence/row) says, for a log call's `extra`."""
    parts = rid.split("/")
    if len(parts) != 4 or not (parts[1].isdigit() and parts[3].isdigit()):
        return {}
    return {"job": parts[0], "shard": int(parts[1]), "row": int(parts[3])}


class _Line(logging.Formatter):
    """Text for eyes."""

    def __init__(self, redact: Redactor) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s  %(message)s", "%H:%M:%S")
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))


class _Json(logging.Formatter):
    """One object a line, for programs."""

    def __init__(self, redact: Redactor, worker: str) -> None:
        super().__init__()
        self._redact, self._worker = redact, worker

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, str | int] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._redact(record.getMessage()),
        }
        known = {"worker": self._worker, **_about.get(), **record.__dict__}
        entry |= {name: known[name] for name in FIELDS if known.get(name) not in (None, "")}
        if record.exc_info:
            entry["exception"] = self._redact(self.formatException(record.exc_info))
        return json.dumps(entry, ensure_ascii=False)


def endure_a_log_that_cannot_be_written() -> None:
    """A full disk or a closed terminal costs lines of the log, and is not itself told, line by line."""
    logging.raiseExceptions = False


def set_up_logging(
    level: str, form: Literal["text", "json"], *, worker: str = "", secrets: Iterable[str] = ()
) -> None:
    """Ours at `level`; libraries speak only when something is wrong. secrets: what no line may hold."""
    endure_a_log_that_cannot_be_written()
    redact = Redactor(secrets)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(redact, worker) if form == "json" else _Line(redact))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("pagemill").setLevel(level.upper())
    logging.getLogger("arq").setLevel(logging.ERROR)
