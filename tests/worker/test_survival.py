"""Whole workers as processes, and what they must survive: each test ends with one row a line."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from worker_place import Place, agree, eventually, rows_of, whole

from pagemill.jobs import layout
from pagemill.jobs.client import Client
from pagemill.jobs.commit import list_segments, read_sealed
from pagemill.worker.simulated import made_up_text

SLOW: dict[str, Any] = {"sim_delay_ms": 150, "sim_max_seqs": 8, "max_rows_in_flight": 16}
ROWS = 600  # that many take SLOW eleven seconds: a test that looks late still finds it at work


def prompts(count: int = ROWS) -> list[str]:
    return [f"prompt {i}" for i in range(count)]


async def sealed_rows(place: Place, job: str) -> set[int]:
    """Rows that Redis has on record as sealed, in any shard."""
    found: set[int] = set()
    async with place.state() as state:
        for segment in list_segments(place.storage(), job):
            recorded = await state.segments(job, segment["shard"])
            found |= read_sealed(place.storage(), recorded).row_indexes
    return found


async def some_sealed(place: Place, client: Client, job: str, least: int = 20) -> None:
    async with asyncio.timeout(30):
        while (status := await client.status(job)).completed < least:
            assert not status.terminal
            await asyncio.sleep(0.05)


async def test_after_kill_9_another_worker_finishes_and_computes_no_sealed_row_again(place: Place) -> None:
    first = await place.spawn(**SLOW).ready()
    async with place.client() as client:
        job = await client.submit(prompts(), model=place.model)
        await some_sealed(place, client, job.id)
        engine = first.engine_pid()
        first.send(signal.SIGKILL)
        await first.ended()
        await eventually(lambda: not Path(f"/proc/{engine}").exists())
        sealed = await sealed_rows(place, job.id)
        assert len(sealed) >= 20
        place.spawn(sim_delay_ms=1)
        rows = await whole(place, client, job, ROWS)
    computed = place.computed()
    assert {index: computed[index] for index in sealed} == dict.fromkeys(sealed, 1)
    assert [row.text for row in rows] == [
        made_up_text(f"prompt {i}", row.seed or 0, 0, 120) for i, row in enumerate(rows)
    ]


async def test_two_workers_share_a_job_and_no_row_runs_twice(place: Place) -> None:
    for _ in range(2):
        place.spawn(sim_delay_ms=20, slots=1)
    for worker in place.processes:
        await worker.ready()
    async with place.client() as client:
        job = await client.submit(prompts(4000), model=place.model)
        await whole(place, client, job, 4000)
    assert set(place.computed().values()) == {1}
    leased = [worker.said().count("shard:") for worker in place.processes]
    assert all(leased), "one of them did nothing"


async def test_sigterm_hands_back_at_once(place: Place) -> None:
    """With a lease of ten minutes: had it not been handed back, the second worker would still wait."""
    first = await place.spawn(**SLOW, lease_ttl_s=600).ready()
    async with place.client() as client:
        job = await client.submit(prompts(), model=place.model)
        await some_sealed(place, client, job.id)
        first.send(signal.SIGTERM)
        assert await first.ended() == 0
        # Its log tells that in the order in which it happened.
        told = (
            "loading model ",
            "engine ready: ",
            "leased",
            "SIGTERM: handing back",
            ": handed back",
            " has left\n",
        )
        at = [first.said().find(words) for words in told]
        assert at == sorted(at), first.said()
        assert min(at) >= 0
        assert " loaded in " in first.said()
        sealed = await sealed_rows(place, job.id)
        # What a step finishes in the very moment of leaving may still be in the pipe.
        assert len(place.computed()) - len(sealed) <= SLOW["sim_max_seqs"], "what was finished is sealed"
        assert not [worker for worker in await client.workers() if worker.models == (place.model,)]
        place.spawn(sim_delay_ms=1, lease_ttl_s=600)
        await whole(place, client, job, ROWS)
    computed = place.computed()
    assert {index: computed[index] for index in sealed} == dict.fromkeys(sealed, 1)


async def test_an_idle_worker_ends_cleanly_on_a_signal(place: Place) -> None:
    worker = await place.spawn().ready()
    worker.send(signal.SIGINT)
    assert await worker.ended() == 0
    assert "Traceback" not in worker.said()


async def test_a_second_signal_ends_it_at_once(place: Place) -> None:
    worker = await place.spawn(**SLOW).ready()
    engine = worker.engine_pid()
    async with place.client() as client:
        await client.submit(prompts(), model=place.model)
        await eventually(place.computed)
        worker.send(signal.SIGTERM)
        worker.send(signal.SIGINT)
        assert await worker.ended() in (0, 128 + signal.SIGINT)
    await eventually(lambda: not Path(f"/proc/{engine}").exists())


async def test_a_worker_frozen_past_its_lease_publishes_nothing(place: Place) -> None:
    frozen = await place.spawn(**SLOW).ready()
    async with place.client() as client:
        job = await client.submit(prompts(), model=place.model)
        await some_sealed(place, client, job.id)
        frozen.send(signal.SIGSTOP)
        place.spawn(sim_delay_ms=1)
        await whole(place, client, job, ROWS)
        before = {info.key for info in place.storage().list(layout.parts(job.id))}
        frozen.send(signal.SIGCONT)
        await eventually(lambda: "lost the lease" in frozen.said() or "not wanted" in frozen.said())
        assert {info.key for info in place.storage().list(layout.parts(job.id))} == before
        await whole(place, client, job, ROWS)


async def test_redis_away_for_five_seconds_is_waited_out(alone: Place, redis_server: Any) -> None:
    worker = await alone.spawn(**SLOW).ready()
    async with alone.client() as client:
        job = await client.submit(prompts(200), model=alone.model)
        await some_sealed(alone, client, job.id)
        redis_server.kill()
        await asyncio.sleep(5)
        await asyncio.to_thread(redis_server.start)
        await whole(alone, client, job, 200)
        assert set(alone.computed().values()) == {1}, "the shard went on meanwhile"
        again = await client.submit(prompts(10), model=alone.model)
        await whole(alone, client, again, 10)
    assert worker.process.poll() is None
    assert "Redis is back" in worker.said()


async def test_a_redis_that_lost_its_scripts_and_connections_is_no_trouble(
    alone: Place, redis_server: Any
) -> None:
    await alone.spawn(**SLOW).ready()
    async with alone.client() as client:
        job = await client.submit(prompts(120), model=alone.model)
        for _ in range(3):
            redis_server.kill()
            await asyncio.to_thread(redis_server.start)
            await asyncio.sleep(0.3)
        await whole(alone, client, job, 120)


@pytest.mark.parametrize("signals", [[signal.SIGTERM] * 3, [signal.SIGKILL] * 2])
async def test_a_storm_of_deploys_loses_nothing(place: Place, signals: list[int]) -> None:
    async with place.client() as client:
        job = await client.submit(prompts(), model=place.model)
        for number in signals:
            worker = await place.spawn(**SLOW).ready()
            count = len(place.computed())
            await eventually(lambda count=count: len(place.computed()) >= count + 12)  # type: ignore[misc]
            worker.send(number)
            await worker.ended()
        place.spawn(sim_delay_ms=1)
        rows = await whole(place, client, job, ROWS)
        assert {row.status for row in rows} == {"completed"}


async def test_cancelled_while_the_worker_dies(place: Place) -> None:
    """The client cancels, the only worker is killed: whoever comes next ends the job with a row a line."""
    worker = await place.spawn(**SLOW).ready()
    async with place.client() as client:
        job = await client.submit(prompts(), model=place.model)
        await some_sealed(place, client, job.id)
        worker.send(signal.SIGKILL)
        await client.cancel(job)
        await worker.ended()
        place.spawn(**SLOW)
        status = await client.wait(job, timeout=30)
        assert status.state == "cancelled"
        rows = await rows_of(client, job)
    agree(status, rows)
    assert [row.row_index for row in rows] == list(range(ROWS))
    assert {row.error_code for row in rows if row.status == "failed"} == {"batch_cancelled"}
    assert sum(row.status == "completed" for row in rows) >= 20
