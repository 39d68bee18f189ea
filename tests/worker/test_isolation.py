"""Finding the row that kills whole workers, by a record that outlives them."""

from __future__ import annotations

import asyncio
import signal

from hypothesis import given
from hypothesis import strategies as st
from worker_place import Place, rows_of

from pagemill.worker.isolation import GROUP, Isolation


def tour(count: int, poison: set[int]) -> tuple[set[int], set[int], int]:
    """Workers, each of which dies of a poison row in its group: rows done, rows blamed, workers lost."""
    left, blamed, deaths, record, trying = list(range(count)), set[int](), 0, "", False
    done: set[int] = set()
    while left:
        isolation = Isolation.load(record)
        if trying and (found := isolation.mourn(left)) is not None:
            blamed.add(found)
            left.remove(found)
        trying = False
        while left:
            group = isolation.next(left)
            record, trying = isolation.dump(), True
            if poison & set(group):
                deaths += 1
                assert deaths < 1000, "it goes on for ever"
                break
            done |= set(group)
            left = [row for row in left if row not in group]
    return done, blamed, deaths


def test_one_row_costs_a_worker_for_each_halving_and_two_alone() -> None:
    done, blamed, deaths = tour(100, {41})
    assert blamed == {41}
    assert done == set(range(100)) - {41}
    assert deaths <= GROUP.bit_length() - 1 + 2


@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=5))
def test_exactly_the_rows_that_kill_are_blamed(count: int, bad: set[int]) -> None:
    poison = {row for row in bad if row < count}
    assert tour(count, poison)[:2] == (set(range(count)) - poison, poison)


def test_rows_that_were_sealed_before_the_death_are_cleared() -> None:
    isolation = Isolation()
    assert isolation.next([1, 2, 3]) == [1, 2, 3]
    assert isolation.mourn([3]) is None
    assert isolation.next([3, 4]) == [3]
    assert isolation.wants_canary
    assert isolation.mourn([4]) is None, "it had been sealed, so it was another's doing"
    assert isolation.next([4]) == [4]
    assert not isolation.wants_canary


async def test_a_row_that_kills_whole_workers_ends_as_poison(place: Place) -> None:
    """Three workers at a time, and a new one for each that dies: as many as the tour takes."""
    quick = {"lease_ttl_s": 0.6, "slots": 1, "seal_seconds": 0.05}
    lines = ["p0", "p1<<kill>>", "p2<<slow:300>>"]
    async with place.client() as client:
        job = await client.submit(lines, model=place.model)
        async with asyncio.timeout(120):
            while not (status := await client.status(job)).terminal:
                alive = [worker for worker in place.processes if worker.process.poll() is None]
                for _ in range(3 - len(alive)):
                    place.spawn(**quick)
                await asyncio.sleep(0.1)
        rows = await rows_of(client, job)
    died = [worker for worker in place.processes if worker.process.poll() == -signal.SIGKILL]
    assert (status.state, status.completed, status.failed) == ("completed", 2, 1)
    assert {row.row_index: row.error_code for row in rows if row.error_code} == {1: "poison_row"}
    assert len(died) <= 2 + 2 + 2
    assert any("runs alone" in worker.said() for worker in place.processes)


async def test_a_shard_in_isolation_that_is_handed_back_blames_nobody(place: Place) -> None:
    async with place.client() as client, place.state() as state:
        job = await client.submit([f"p{i}<<slow:600>>" for i in range(9)], model=place.model)
        strikes = f"{state.key(job.id)}:strikes"
        await state.redis.hset(strikes, "shard:0", "2")  # type: ignore[misc]
        for _ in range(2):
            async with place.worker(), asyncio.timeout(20):
                while not (await state.trial(job.id, "shard:0"))[1]:
                    await asyncio.sleep(0.02)
        assert (await state.trial(job.id, "shard:0"))[1] == ""
        async with place.worker():
            status = await client.wait(job, timeout=30)
    assert (status.state, status.completed) == ("completed", 9)
