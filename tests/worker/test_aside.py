"""Plans, merges and endings that kill their process: a strike, a process of their own, and an end of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from worker_place import Place, agree, eventually, rows_of, whole

from pagemill.jobs import layout
from pagemill.jobs.client import Job
from pagemill.worker import tasks

NO_MEMORY: dict[str, Any] = {"task_memory_gb": 0.001}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.05)
    yield


async def struck(place: Place, job: Job, task: str, strikes: int = 1) -> None:
    """As if a worker had died of it before."""
    async with place.state() as state:
        await state.redis.hset(f"{state.key(job.id)}:strikes", task, str(strikes))  # type: ignore[misc]


def asides(parent: int) -> list[int]:
    """Processes of their own that a worker has started."""
    found = []
    for thread in Path(f"/proc/{parent}/task").iterdir():
        for pid in map(int, (thread / "children").read_text().split()):
            with suppress(FileNotFoundError):
                if b"pagemill.worker.aside" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
    return found


@pytest.mark.parametrize("task", ["plan", "shard:0", "finalize"])
async def test_what_has_killed_a_worker_once_is_done_aside_and_ends_well(place: Place, task: str) -> None:
    async with place.client() as client:
        job = await client.submit(["a", "<<fail>>", "c"], model=place.model)
        await struck(place, job, task, 2)
        worker = place.spawn()
        rows = await whole(place, client, job, 3)
    assert [row.error_code for row in rows] == [None, "numeric_error", None]
    assert "in process" in worker.said()


async def test_a_plan_that_never_survives_fails_the_job_with_a_sentence(place: Place) -> None:
    async with place.client() as client:
        job = await client.submit(["x"], model=place.model, priority=1)
        await struck(place, job, "plan")
        other = await client.submit(["y"], model=place.model)
        async with place.worker(**NO_MEMORY):
            status = await client.wait(job, timeout=60)
            assert (status.state, status.error_code) == ("failed", "task_crashed")
            for word in ("Planning", "3 times", "PAGEMILL_TASK_MEMORY_GB", "split the input"):
                assert word in status.error_message
            assert await rows_of(client, job) == []
            await whole(place, client, other, 1)


async def test_an_ending_that_never_survives_fails_the_job_and_keeps_its_rows(place: Place) -> None:
    async with place.client() as client:
        job = await client.submit(["x", "y"], model=place.model)
        await struck(place, job, "finalize")
        async with place.worker(**NO_MEMORY):
            status = await client.wait(job, timeout=60)
        assert (status.state, status.error_code) == ("failed", "task_crashed")
        assert "unchecked" in status.error_message
        rows = await rows_of(client, job)
    agree(status, rows)
    assert [row.status for row in rows] == ["completed"] * 2


async def test_a_merge_that_never_survives_fails_the_job_and_every_row_has_its_line(place: Place) -> None:
    async with place.client() as client:
        job = await client.submit([f"p{i}" for i in range(12)], model=place.model)
        await struck(place, job, "shard:0", 2)
        async with place.worker(**NO_MEMORY):
            status = await client.wait(job, timeout=60)
        assert (status.state, status.error_code) == ("failed", "task_crashed")
        rows = await rows_of(client, job)
    agree(status, rows)
    assert [row.row_index for row in rows] == list(range(12))
    assert {row.error_code for row in rows} == {"job_failed"}


async def test_one_death_is_no_verdict(place: Place) -> None:
    """Killed from outside, as by the kernel out of memory; the second try goes through."""
    async with place.client() as client:
        job = await client.submit([f"p{i}" for i in range(500)], model=place.model)
        await struck(place, job, "plan")
        worker = place.spawn(sim_max_seqs=512)
        await eventually(lambda: asides(worker.process.pid))
        os.kill(asides(worker.process.pid)[0], signal.SIGKILL)
        await whole(place, client, job, 500)
    assert "Planning was killed by SIGKILL in a process of its own" in worker.said()
    assert worker.said().count("in process") == 2


async def test_a_worker_killed_while_it_plans_is_a_strike_and_its_child_goes_too(place: Place) -> None:
    async with place.client() as client:
        job = await client.submit([f"p{i}" for i in range(500)], model=place.model)
        await struck(place, job, "plan")
        first = place.spawn()
        await eventually(lambda: asides(first.process.pid))
        (child,) = asides(first.process.pid)
        first.send(signal.SIGKILL)
        await first.ended()
        await eventually(lambda: not Path(f"/proc/{child}").exists())
        place.spawn(sim_max_seqs=512)
        await whole(place, client, job, 500)


async def test_a_store_that_refuses_is_no_crash(place: Place) -> None:
    async with place.client() as client:
        job = await client.submit(["x"], model=place.model)
        await struck(place, job, "plan")
        document = place.storage().get(layout.job(job.id))
        place.storage().delete([layout.job(job.id)])
        async with place.worker():
            async with asyncio.timeout(60):
                while "holds no job" not in (await client.status(job)).blocked_reason:
                    await asyncio.sleep(0.05)
            place.storage().put(layout.job(job.id), document)
            await whole(place, client, job, 1)
        async with place.state() as state:
            assert await state.trial(job.id, "plan") == ("", "")
