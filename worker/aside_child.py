"""The process that does one plan, merge or ending, and may die of it (aside.py).

It gets one line of JSON on its standard input ({"store", "options", "memory_bytes", "work", "args"}) and
answers with one ({"decided"} or {"raised", "message", …}); it ends when that pipe closes. It imports jobs
alone, so that it starts in a moment; it may not know Redis.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from pagemill.jobs.errors import PagemillError
from pagemill.jobs.settle import WORKS
from pagemill.jobs.storage import StorageOptions, open_storage


def main() -> None:
    """Do what the line asks for."""
    line = sys.stdin.buffer.readline()
    if not line:
        return
    order = json.loads(line)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    threading.Thread(target=_end_with_the_worker, daemon=True).start()
    _limit(order["memory_bytes"])
    try:
        storage = open_storage(order["store"], StorageOptions(**order["options"]))
        said: dict[str, Any] = {"decided": WORKS[order["work"]](storage, **order["args"])}
    except Exception as error:
        if not isinstance(error, PagemillError):
            traceback.print_exc()
        said = {
            "raised": type(error).__name__,
            "message": str(error),
            "transient": getattr(error, "transient", False),
            "missing": sorted(getattr(error, "missing", ())),
            "unexpected": sorted(getattr(error, "unexpected", ())),
        }
    answer.write(json.dumps(said).encode() + b"\n")
    answer.flush()
    os._exit(0)


def _limit(memory_bytes: int) -> None:
    """What malloc and mappings may take; and when the machine runs out all the same, we are the one to go."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _end_with_the_worker() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
