"""Tasks that need no engine: each may be done twice, by anybody, and is decided in the store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_worker import do, seal_some, take, work

from pagemill.jobs import layout
from pagemill.jobs.client import Client, Job
from pagemill.jobs.errors import StorageError
from pagemill.jobs.settle import kept, settle, settle_job
from pagemill.jobs.state import State, new_nonce
from pagemill.jobs.storage import read_json


async def planned(client: Client, model: str, rows: int = 3) -> tuple[Job, State]:
    job = await client.submit([f"p{i}" for i in range(rows)], model=model)
    state = await client.state()
    await work(state, client.storage, model, tasks=1)
    return job, state


async def test_a_plan_is_adopted_by_whoever_comes_second(client: Client, model: str) -> None:
    job = await client.submit(["a"], model=model)
    state = await client.state()
    lease = await take(state, model)
    assert lease is not None
    await settle(state, client.storage, lease)
    plan = read_json(client.storage, layout.plan(job.id))
    await settle(state, client.storage, lease)
    assert read_json(client.storage, layout.plan(job.id)) == plan
    assert (await job.status()).shards_total == 1


async def test_the_end_may_be_written_twice(client: Client, model: str) -> None:
    job, state = await planned(client, model)
    await work(state, client.storage, model, tasks=1)
    lease = await take(state, model)
    assert lease is not None
    assert lease.kind == "finalize"
    await settle(state, client.storage, lease)
    manifest = read_json(client.storage, layout.manifest(job.id))
    await settle(state, client.storage, lease)
    assert read_json(client.storage, layout.manifest(job.id)) == manifest
    assert (await job.status()).state == "completed"


async def test_a_shard_that_runs_needs_an_engine(client: Client, model: str) -> None:
    _, state = await planned(client, model)
    lease = await take(state, model)
    assert lease is not None
    with pytest.raises(ValueError, match="engine"):
        await settle(state, client.storage, lease)


@pytest.mark.parametrize("reason", ["cancelled", "expired", "failed"])
async def test_a_stopped_shard_keeps_its_sealed_rows(client: Client, model: str, reason: str) -> None:
    job, state = await planned(client, model)
    lease = await take(state, model)
    assert lease is not None
    await seal_some(state, client.storage, lease, 2)
    client.storage.put(layout.stop(job.id), f'{{"reason":"{reason}","at":0}}'.encode())
    await state.stop(job.id, reason)  # type: ignore[arg-type]
    lease = await take(state, model)
    assert lease is not None
    await settle(state, client.storage, lease)
    await settle(state, client.storage, lease)  # a reply was lost, say
    await work(state, client.storage, model)
    status = await job.status()
    assert (status.state, status.completed, status.failed) == (reason, 2, 1)
    code = {"cancelled": "batch_cancelled", "expired": "batch_expired", "failed": "job_failed"}[reason]
    assert [row.error_code for row in await job.results().list()].count(code) == 1


async def test_a_commit_that_is_there_is_adopted_by_a_stop(client: Client, model: str) -> None:
    """The shard's worker committed, and died before it told Redis; then the job was cancelled."""
    job, state = await planned(client, model)
    lease = await take(state, model)
    assert lease is not None

    class Deaf:
        async def committed(self, *_: object) -> None:
            return None

    await do(Deaf(), client.storage, lease)  # type: ignore[arg-type]
    await state.release(lease.job, lease.task, lease.fence)
    await job.cancel()
    assert [row.status for row in await job.results().list()] == ["completed"] * 3


async def test_a_sealed_segment_that_is_gone_counts_as_unfinished(client: Client, model: str) -> None:
    job, state = await planned(client, model)
    lease = await take(state, model)
    assert lease is not None
    await seal_some(state, client.storage, lease, 2)
    client.storage.delete([info.key for info in client.storage.list(layout.work(job.id))])
    await job.cancel()
    rows = await job.results().list()
    assert [row.error_code for row in rows] == ["batch_cancelled"] * 3
    status = await job.status()
    assert (status.completed, status.failed, status.total) == (0, 3, 3)


async def test_what_another_holds_is_left_alone(client: Client, model: str) -> None:
    job, state = await planned(client, model)
    assert await take(state, model) is not None
    outcome = await job.cancel()
    assert outcome.state == "cancelling"
    await settle_job(state, client.storage, job.id, model)
    assert (await job.status()).state == "cancelling"


async def test_a_store_without_the_job_is_named(client: Client, model: str, tmp_path: Path) -> None:
    await client.submit(["a"], model=model)
    state = await client.state()
    async with Client(None, str(tmp_path / "other")) as other:
        lease = await take(state, model)
        assert lease is not None
        with pytest.raises(StorageError, match="same store"):
            await settle(state, other.storage, lease)


async def test_a_lease_is_kept_while_the_work_lasts(client: Client, model: str) -> None:
    await client.submit(["a"], model=model)
    state = await client.state()
    lease = await state.lease(model, worker="slow", nonce=new_nonce(), ttl_ms=300)
    assert lease is not None
    async with kept(state, "slow", lease):
        await asyncio.sleep(0.9)
        assert await take(state, model) is None
    await settle(state, client.storage, lease)


async def test_a_settler_that_fails_hands_its_task_back(client: Client, model: str, tmp_path: Path) -> None:
    job = await client.submit(["a"], model=model)
    state = await client.state()
    async with Client(None, str(tmp_path / "other")) as other:
        with pytest.raises(StorageError):
            await settle_job(state, other.storage, job.id, model)
    assert await take(state, model) is not None
