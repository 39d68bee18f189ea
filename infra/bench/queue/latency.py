"""How soon work starts: a small job behind a huge one, and a shard whose worker was killed or told to leave.

Workers are warm and idle where they take over, with the settings they have by default. Each figure is in
milliseconds, of several tries, the worst among them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from run import MODEL, Place, place

from pagemill.jobs.client import Client

TRIES = 5
KILLS = 2
ROWS_A_SECOND = 500
"""Of each worker in the first part: slow enough that the huge job is still running at the end of it."""
PATIENCE_S = 60.0


def latency_run(store: str, folder: Path) -> dict[str, Any]:
    """All three figures, each in a place of its own."""
    with place(store, folder) as here:
        behind = _small_behind_huge(here)
    with place(store, folder) as here:
        left = [_taken_over(here, signal.SIGTERM, number) for number in range(TRIES)]
    with place(store, folder) as here:
        killed = [_taken_over(here, signal.SIGKILL, number) for number in range(KILLS)]
    return {
        "store": store,
        "small_job_behind_huge_first_row_ms": _summary(behind),
        "after_sigterm_next_lease_ms": _summary(left),
        "after_kill_9_next_lease_ms": _summary(killed),
        "lease_ttl_ms": 15_000,
    }


def _summary(seconds: list[float]) -> dict[str, Any]:
    each = [round(one * 1000, 1) for one in seconds]
    return {"worst": max(each), "median": median(each), "each": each}


def _small_behind_huge(here: Place) -> list[float]:
    """Seconds from asking for a job of ten rows until the first of them came out of an engine."""
    log = here.folder / "computed"
    for _ in range(2):
        here.start(sim_rows_per_second=ROWS_A_SECOND, sim_log=log)
    submit(here, "huge", [f"huge {n}" for n in range(20_000)])
    until(lambda: log.exists())
    found = []
    for number in range(TRIES):
        job = f"small-{number}"
        asked = time.monotonic()
        submit(here, job, [f"small {n}" for n in range(10)])
        until(lambda job=job: f"{job}/" in log.read_text())  # type: ignore[misc]
        found.append(time.monotonic() - asked)
    if here.client().hget("pagemill:{huge}", "state") != "in_progress":
        raise SystemExit("the huge job was not running to the end: give it more rows")
    return found


def _taken_over(here: Place, how: signal.Signals, number: int) -> float:
    """Seconds from the signal to the holder of a shard until another worker holds it."""
    while sum(worker.poll() is None for worker in here.workers) < 2:
        here.start()
    job, redis = f"taken-{number}", here.client()
    submit(here, job, ["<<slow:600000>>"])

    def holder() -> str:
        held = redis.hget(f"pagemill:{{{job}}}:holders", "shard:0")
        return "" if held is None else str(json.loads(held)["worker"])

    until(lambda: holder())
    first = holder()
    time.sleep(1.0)  # let its row go down to the engine
    began = time.monotonic()
    _process(here, first).send_signal(how)
    until(lambda: holder() not in ("", first))
    took = time.monotonic() - began
    asyncio.run(_cancel(here, job))
    return took


def _process(here: Place, worker: str) -> subprocess.Popen[bytes]:
    return here.workers[int(worker.removeprefix("w"))]


def submit(here: Place, job: str, prompts: list[str]) -> None:
    async def work() -> None:
        async with _client(here) as client:
            await client.submit(prompts, model=MODEL, job_id=job, max_shards=None)

    asyncio.run(work())


async def _cancel(here: Place, job: str) -> None:
    async with _client(here) as client:
        await client.cancel(job)
        await client.wait(job, timeout=PATIENCE_S)


def _client(here: Place) -> Client:
    os.environ.update(
        {name: value for name, value in here.env.items() if name.startswith(("PAGEMILL_", "AWS_"))}
    )
    return Client()


def until(true: Callable[[], object]) -> None:
    """Waits until it is, looking a hundred times a second."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit("what was waited for did not happen within a minute")
        time.sleep(0.01)
