"""A Redis that lost everything, or its last second: workers bring its jobs back, and nothing counts twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from worker_place import Place, eventually, whole

from pagemill.jobs import layout
from pagemill.jobs.client import Client, Job
from pagemill.jobs.errors import JobNotFound
from pagemill.jobs.storage import read_json

SLOW: dict[str, Any] = {"sim_delay_ms": 40, "sim_max_seqs": 8, "max_rows_in_flight": 16}
ROWS = 160


def prompts(count: int = ROWS) -> list[str]:
    """The first one keeps its shard from being done before Redis forgets it."""
    return ["<<slow:2000>>"] + [f"prompt {i}" for i in range(1, count)]


async def some_done(client: Client, job: Job, least: int = 20) -> None:
    async with asyncio.timeout(30):
        while (status := await client.status(job)).completed < least:
            assert not status.terminal
            await asyncio.sleep(0.05)


async def back(client: Client, *jobs: Job) -> None:
    """Wait until Redis knows them again."""
    async with asyncio.timeout(30):
        for job in jobs:
            while True:
                try:
                    await client.status(job)
                    break
                except JobNotFound:
                    await asyncio.sleep(0.05)


async def flush(place: Place) -> None:
    async with place.state() as state:
        await state.redis.flushall()


def committed_once(place: Place, job: Job) -> None:
    """One commit record and one part a shard, and the manifest lists those."""
    storage = place.storage()
    plan, manifest = (read_json(storage, key) for key in (layout.plan(job.id), layout.manifest(job.id)))
    assert plan is not None
    assert manifest is not None
    shards = [part["shard"] for part in manifest["parts"]]
    assert sorted(shards) == [entry["shard"] for entry in plan["shards"]]
    commits = [layout.commit_shard(info.key) for info in storage.list(layout.commits(job.id))]
    assert Counter(commits) == Counter(shards)
    parts = {info.key for info in storage.list(layout.parts(job.id))}
    assert parts == {part["key"] for part in manifest["parts"]}
    assert not list(storage.list(layout.hints(place.model)))


async def test_a_flush_in_the_middle_of_jobs_loses_none_of_them(alone: Place) -> None:
    workers = [await alone.spawn(**SLOW, slots=1).ready() for _ in range(2)]
    async with alone.client() as client:
        running = await client.submit(prompts(), model=alone.model, shard_rows=60)
        waiting = await client.submit(prompts(30), model=alone.model, priority=-1)
        await some_done(client, running)
        await flush(alone)
        await back(client, running, waiting)
        rows = await whole(alone, client, running, ROWS)
        await whole(alone, client, waiting, 30)
    assert {row.status for row in rows} == {"completed"}
    committed_once(alone, running)
    committed_once(alone, waiting)
    assert "rebuilt from its objects" in "".join(worker.said() for worker in workers)
    assert all(worker.process.poll() is None for worker in workers)


async def test_rows_that_were_finished_at_the_flush_are_not_computed_again(alone: Place) -> None:
    """None was sealed yet: the worker puts them away before the job is rebuilt."""
    worker = await alone.spawn(**SLOW, slots=1, seal_rows=1000, seal_seconds=60).ready()
    async with alone.client() as client:
        job = await client.submit(prompts(), model=alone.model)
        await eventually(lambda: len(alone.computed()) >= 60)
        await flush(alone)
        await back(client, job)
        await whole(alone, client, job, ROWS)
    assert "rows are sealed already" in worker.said()
    twice = [index for index, times in alone.computed().items() if times > 1]
    assert len(twice) <= SLOW["max_rows_in_flight"], "only what was in the engine"


async def test_a_restart_without_persistence_is_survived(alone: Place, redis_server: Any) -> None:
    await alone.spawn(**SLOW).ready()
    async with alone.client() as client:
        job = await client.submit(prompts(), model=alone.model, shard_rows=60)
        await some_done(client, job)
        redis_server.kill()
        redis_server.durable = False
        await asyncio.to_thread(redis_server.start)
        await back(client, job)
        await whole(alone, client, job, ROWS)
    committed_once(alone, job)


async def test_a_failover_that_lost_the_last_seconds_is_survived(alone: Place, redis_server: Any) -> None:
    redis_server.kill()
    redis_server.durable = False
    await asyncio.to_thread(redis_server.start)
    for _ in range(2):
        await alone.spawn(**SLOW, slots=1, rescue_seconds=1).ready()
    async with alone.client() as client, alone.state() as state:
        job = await client.submit(prompts(), model=alone.model, shard_rows=20)
        await some_done(client, job)
        await state.redis.save()  # type: ignore[no-untyped-call]
        before = (await client.status(job)).shards_done
        late = await client.submit(prompts(30), model=alone.model)
        async with asyncio.timeout(30):
            while (await client.status(job)).shards_done < before + 2:
                await asyncio.sleep(0.05)
        redis_server.kill()
        await asyncio.to_thread(redis_server.start)
        await back(client, job)
        await back(client, job, late)
        await whole(alone, client, job, ROWS)
        await whole(alone, client, late, 30)
    committed_once(alone, job)
    committed_once(alone, late)


async def test_a_worker_that_starts_finds_the_jobs_that_redis_lost(alone: Place) -> None:
    async with alone.client() as client:
        unplanned = await client.submit(prompts(30), model=alone.model)
        stopped = await client.submit(prompts(30), model=alone.model)
        foreign = await client.submit(prompts(3), model="another")
        alone.storage().put(layout.stop(stopped.id), b'{"reason":"cancelled","at":1.0}')
        await flush(alone)
        await alone.spawn(**SLOW).ready()
        await back(client, unplanned, stopped)
        await whole(alone, client, unplanned, 30)
        assert (await client.wait(stopped, timeout=20)).state == "cancelled"
        async with alone.state() as state:
            assert await state.status(foreign.id) is None


async def test_a_lost_job_is_found_by_a_worker_that_noticed_nothing(place: Place) -> None:
    """As after a failover: the registry is intact, and one job is gone."""
    async with place.worker(rescue_seconds=0.5), place.client() as client, place.state() as state:
        late = await client.submit(prompts(4), model=place.model)
        keys = await state.redis.keys(f"{state.key(late.id)}*")
        await state.redis.delete(*keys)
        await back(client, late)
        await whole(place, client, late, 4)


async def test_a_flush_does_not_let_other_weights_go_on_with_a_job(alone: Place) -> None:
    """The simulated engine's weights are the length of its answers."""
    first = await alone.spawn(**SLOW, sim_output_chars=40).ready()
    async with alone.client() as client:
        job = await client.submit(prompts(), model=alone.model, shard_rows=60)
        await some_done(client, job)
        first.process.kill()
        await first.ended()
        await flush(alone)
        other = await alone.spawn(**SLOW, sim_output_chars=50).ready()
        async with asyncio.timeout(20):
            while True:
                async with alone.state() as state:
                    known = await state.status(job.id)
                if known is not None and "other weights" in known.blocked_reason:
                    break
                await asyncio.sleep(0.1)
        await alone.spawn(sim_output_chars=40).ready()
        rows = await whole(alone, client, job, ROWS)
        manifest = read_json(alone.storage(), layout.manifest(job.id))
    assert {len(row.text or "") for row in rows} == {40}
    assert manifest is not None
    assert manifest["fingerprint"].endswith("-40")
    assert other.process.poll() is None
