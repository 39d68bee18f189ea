"""The worker's log: one line an event, as text or as JSON, to stderr. Prompts and answers are never in it."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def endure_a_log_that_cannot_be_written() -> None:
    """A full disk or a closed terminal costs lines of the log, and is not itself told, line by line."""
    logging.raiseExceptions = False


def set_up_logging(level: str, form: Literal["text", "json"]) -> None:
    """Ours at `level`; libraries speak only when something is wrong."""
    endure_a_log_that_cannot_be_written()
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s  %(message)s", "%H:%M:%S")
    handler.setFormatter(_Json() if form == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("pagemill").setLevel(level.upper())
    logging.getLogger("arq").setLevel(logging.ERROR)
