"""The processes of a load run: the program's own client and worker, with clocks around their stages.

    stages.py submit FILE MODEL JOB     as `pagemill submit`; prints what it took as JSON
    stages.py results JOB               reads every row, as rows and as record batches
    stages.py worker CLOCKS             as `pagemill worker`; writes what its stages took to CLOCKS at its end

They read PAGEMILL_* as the program does. A stage's clock is the CPU time of the thread that runs it; what
plan and finalize take is the whole process's, which does nothing else meanwhile (run.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import peak_mb

STAGES = {"read": "read_texts", "seal": "write_segment", "commit": "commit_shard"}
"""Stages of a shard, and the function of worker/shard.py that does each in a thread of its own."""


def own_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Took:
    """CPU and wall seconds of a block, and the most memory that this process has held by its end."""

    def __enter__(self) -> Took:
        self._wall, self._cpu = time.monotonic(), own_cpu_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        self.figures = {
            "wall_seconds": time.monotonic() - self._wall,
            "cpu_seconds": own_cpu_seconds() - self._cpu,
            "peak_mb": peak_mb(os.getpid()),
        }


def submit(file: str, model: str, job: str) -> dict[str, Any]:
    from pagemill.jobs.client import Client

    async def work() -> None:
        async with Client() as client:
            await client.submit(file, model=model, job_id=job, defaults={"temperature": 0.7})

    with Took() as took:
        asyncio.run(work())
    return {**took.figures, "submitted_at": time.time()}


def results(job: str) -> dict[str, Any]:
    from pagemill.jobs.results import iter_batches, iter_results
    from pagemill.jobs.settings import ClientSettings
    from pagemill.jobs.storage import open_storage

    settings = ClientSettings.load()
    storage = open_storage(settings.store, settings.storage_options())
    with Took() as as_batches:
        in_batches = sum(batch.num_rows for batch in iter_batches(storage, job))
    with Took() as as_rows:
        rows = sum(1 for _ in iter_results(storage, job))
    return {
        "rows": rows,
        "rows_in_batches": in_batches,
        "as_rows": as_rows.figures,
        "as_batches": as_batches.figures,
    }


def worker(clocks: str) -> int:
    import pagemill.worker.shard as shard
    from pagemill.worker import main
    from pagemill.worker.logs import set_up_logging
    from pagemill.worker.settings import WorkerSettings

    spent: Counter[str] = Counter()

    def clocked(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                spent[stage] += time.thread_time() - began

        return timed

    for stage, name in STAGES.items():
        setattr(shard, name, clocked(stage, getattr(shard, name)))
    settings = WorkerSettings.load()
    set_up_logging(settings.log_level, settings.log_format)
    code = asyncio.run(main._run_until_signal(settings))
    Path(clocks).write_text(json.dumps(spent))
    return code


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "worker":
        status = worker(*words)
        sys.stderr.flush()
        os._exit(status)  # as the worker itself does: threads that wait for a store are not waited for
    print(json.dumps({"submit": submit, "results": results}[what](*words)))
