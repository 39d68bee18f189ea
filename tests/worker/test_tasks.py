"""Whatever a task raises, at whatever stage: the job goes on, and says what is wrong while it does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from worker_place import Place, whole

from pagemill.jobs import layout
from pagemill.jobs import settle as settling
from pagemill.jobs.errors import StorageError
from pagemill.worker import shard, tasks


class Failing:
    """Stands before a function and raises the first few times."""

    def __init__(self, real: Any, error: Exception, times: int) -> None:
        self.real, self.error, self.left = real, error, times

    def __call__(self, *args: Any, **how: Any) -> Any:
        if self.left:
            self.left -= 1
            raise self.error
        return self.real(*args, **how)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr("pagemill.worker.workshop.FIRST_PAUSE_S", 0.02)


SEALING: dict[str, Any] = {"seal_rows": 5, "sim_delay_ms": 20, "sim_max_seqs": 5}
STAGES = [
    (tasks, "settle"),
    (settling, "make_plan"),
    (settling, "finalize"),
    (tasks, "run_shard"),
    (shard, "read_commit"),
    (shard, "read_texts"),
    (shard, "write_segment"),
    (shard, "commit_shard"),
]


@pytest.mark.parametrize(("module", "stage"), STAGES)
async def test_an_unforeseen_exception_leaves_no_job_behind(
    place: Place, monkeypatch: pytest.MonkeyPatch, module: Any, stage: str
) -> None:
    failing = Failing(getattr(module, stage), RuntimeError("the unforeseen"), 2)
    monkeypatch.setattr(module, stage, failing)
    async with place.worker(**SEALING), place.client() as client:
        job = await client.submit([f"p{i}" for i in range(25)], model=place.model)
        await whole(place, client, job, 25)
    assert failing.left == 0


async def test_what_keeps_failing_is_said_in_the_job_until_it_works(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(tasks.settle, RuntimeError("the unforeseen"), 10**6)
    monkeypatch.setattr(tasks, "settle", failing)
    async with place.worker(), place.client() as client:
        job = await client.submit(["a"], model=place.model)
        async with asyncio.timeout(20):
            while "plan failed 3 times" not in (reason := (await client.status(job)).blocked_reason):
                await asyncio.sleep(0.05)
        assert "the unforeseen" in reason
        failing.left = 0
        await whole(place, client, job, 1)
        assert (await client.status(job)).blocked_reason == ""


@pytest.mark.parametrize("stage", ["read_commit", "read_texts", "write_segment", "commit_shard"])
async def test_a_store_that_refuses_for_a_while_costs_nothing_but_time(
    place: Place, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    failing = Failing(getattr(shard, stage), StorageError("503 Slow Down", transient=True), 5)
    monkeypatch.setattr(shard, stage, failing)
    async with place.worker(**SEALING), place.client() as client:
        job = await client.submit([f"p{i}" for i in range(25)], model=place.model)
        await whole(place, client, job, 25)
        assert (await client.status(job)).blocked_reason == ""
    assert failing.left == 0
    assert set(place.computed().values()) == {1}, "what was computed is not computed again"


async def test_a_store_that_goes_on_refusing_is_said_in_the_job(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(shard.commit_shard, StorageError("The disk is full."), 10**6)
    monkeypatch.setattr(shard, "commit_shard", failing)
    async with place.worker(), place.client() as client:
        job = await client.submit(["a"], model=place.model)
        async with asyncio.timeout(20):
            while "The disk is full" not in (await client.status(job)).blocked_reason:
                await asyncio.sleep(0.05)
        failing.left = 0
        await whole(place, client, job, 1)
        assert (await client.status(job)).blocked_reason == ""


async def test_a_sealed_segment_that_is_damaged_is_computed_again(place: Place) -> None:
    from pagemill.jobs.commit import list_segments

    async with place.client() as client:
        job = await client.submit([f"p{i}" for i in range(60)], model=place.model)
        async with place.worker(sim_delay_ms=100, sim_max_seqs=4, max_rows_in_flight=4, seal_rows=4):
            while len(list_segments(place.storage(), job.id)) < 2:
                await asyncio.sleep(0.05)
        first, second, *_ = list_segments(place.storage(), job.id)
        place.storage().delete([first["key"]])
        place.storage().put(second["key"], b"PAR1 and nothing else")
        async with place.worker():
            await whole(place, client, job, 60)


async def test_a_job_that_keeps_failing_starves_none_behind_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more priority and one slot: it would be the next task for ever."""
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 1.0)
    bad = {"job": ""}
    real = tasks.settle

    async def failing(state: Any, storage: Any, lease: Any, **how: Any) -> None:
        if lease.job == bad["job"]:
            raise StorageError("A part of it is damaged.")
        await real(state, storage, lease, **how)

    monkeypatch.setattr(tasks, "settle", failing)
    async with place.client() as client:
        broken = await client.submit(["a"], model=place.model, priority=9)
        bad["job"] = broken.id
        jobs = [await client.submit([f"p{i}" for i in range(3)], model=place.model) for _ in range(4)]
        async with place.worker(slots=1):
            for job in jobs:
                await whole(place, client, job, 3)
            assert "is damaged" in (await client.status(broken)).blocked_reason


async def test_a_deleted_job_that_an_older_redis_still_runs_is_forgotten(place: Place) -> None:
    """Redis failed over to a replica that had heard neither of the job's end nor of its deletion."""
    async with place.client() as client, place.state() as state:
        job = await client.submit([f"p{i}" for i in range(5)], model=place.model)
        keys = list(await state.redis.keys(f"{state.key(job.id)}*"))
        before = {key: await state.redis.dump(key) for key in keys}
        async with place.worker():
            await whole(place, client, job, 5)
            await client.delete(job)
        await state.redis.delete(*await state.redis.keys(f"{state.key(job.id)}*"))
        for key, value in before.items():
            await state.redis.restore(key, 0, value)
        ready = await state.redis.hget(f"{state.key(job.id)}:meta", "ready")
        await state.redis.zadd(f"pagemill:model:{place.model}:ready", {ready: 0})
        assert (await client.status(job)).state == "validating"
        async with place.worker(), asyncio.timeout(30):
            while await state.status(job.id) is not None:
                await asyncio.sleep(0.05)
        left = [info.key for info in place.storage().list(layout.root(job.id))]
        assert left == [layout.tombstone(job.id)]
        assert await state.redis.zcard(f"pagemill:model:{place.model}:ready") == 0
