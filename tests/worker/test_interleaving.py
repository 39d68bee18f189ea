"""Whole workers with several jobs: small ones start behind huge ones, priority and caps hold."""

from __future__ import annotations

import asyncio
from typing import Any

from worker_place import Place, eventually, whole

SLOW: dict[str, Any] = {"sim_delay_ms": 60, "sim_max_seqs": 8, "max_rows_in_flight": 16}


def jobs_in_order(place: Place) -> list[str]:
    """The job of each row that was computed, as it came."""
    return [rid.partition("/")[0] for rid in place.sim_log.read_text().split()]


async def test_small_jobs_start_behind_a_huge_one_of_the_same_model(place: Place) -> None:
    """One after the other, each ends while the huge one has most of its work before it."""
    await place.spawn(**SLOW).ready()
    async with place.client() as client:
        huge = await client.submit([f"p{i}" for i in range(2000)], model=place.model, shard_rows=200)
        await eventually(place.computed)
        for _ in range(3):
            small = await client.submit(["one", "two"], model=place.model)
            await whole(place, client, small, 2)
        status = await client.status(huge)
        assert (status.state, status.failed) == ("in_progress", 0)
        await client.cancel(huge)


async def test_an_engine_of_many_rows_gets_shards_until_it_is_full(place: Place) -> None:
    await place.spawn(sim_delay_ms=60_000, sim_max_seqs=320).ready()
    async with place.client() as client, place.state() as state:
        job = await client.submit([f"p{i}" for i in range(700)], model=place.model, shard_rows=70)
        async with asyncio.timeout(30):
            while await state.redis.zcard(f"{state.key(job.id)}:leases") < 5:
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.5)
        assert await state.redis.zcard(f"{state.key(job.id)}:leases") == 5, "640 rows, one slot for 128"
        await client.cancel(job)


async def test_a_job_of_higher_priority_goes_before_what_waits(place: Place) -> None:
    await place.spawn(**SLOW, slots=3).ready()
    async with place.client() as client:
        low = await client.submit([f"l{i}" for i in range(900)], model=place.model, shard_rows=10)
        await eventually(place.computed)
        high = await client.submit(
            [f"h{i}" for i in range(120)], model=place.model, shard_rows=10, priority=5
        )
        await whole(place, client, high, 120)
        assert not (await client.status(low)).terminal
        order = jobs_in_order(place)
        await client.cancel(low)
    first, last = order.index(high.id), len(order) - 1 - order[::-1].index(high.id)
    between = order[first:last].count(low.id)
    assert between < 120, "what was leased before, and the slot for starved jobs"


async def test_a_cap_on_shards_holds_across_workers_and_leaves_room_for_others(place: Place) -> None:
    for _ in range(2):
        await place.spawn(**SLOW, slots=4).ready()
    async with place.client() as client, place.state() as state:
        capped = await client.submit(
            [f"c{i}" for i in range(120)], model=place.model, shard_rows=10, max_shards=2
        )
        most = 0
        other = None
        async with asyncio.timeout(60):
            while not (status := await client.status(capped)).terminal:
                held = await state.redis.zrange(f"{state.key(capped.id)}:leases", 0, -1)
                most = max(most, len(held))
                if other is None and status.completed:
                    other = await client.submit(["x"], model=place.model)
                await asyncio.sleep(0.01)
        assert most == 2
        assert other is not None
        await whole(place, client, capped, 120)
        await whole(place, client, other, 1)


async def test_two_jobs_of_one_priority_both_move(place: Place) -> None:
    await place.spawn(**SLOW).ready()
    async with place.client() as client:
        jobs = [
            await client.submit([f"{name}{i}" for i in range(300)], model=place.model, shard_rows=10)
            for name in "ab"
        ]
        await eventually(lambda: place.sim_log.exists() and len(set(jobs_in_order(place))) == 2)
        for job in jobs:
            await whole(place, client, job, 300)
    order = jobs_in_order(place)
    halfway = order[: len(order) // 2]
    assert all(halfway.count(job.id) >= len(halfway) // 4 for job in jobs), "neither waited for the other"
