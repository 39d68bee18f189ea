"""A deleted job is gone from Redis and store, and stays gone."""

from __future__ import annotations

import pytest
from fake_worker import unique, work

from pagemill.jobs import layout
from pagemill.jobs.client import Client, Job
from pagemill.jobs.deletion import forget_deleted
from pagemill.jobs.errors import JobConflict, JobNotFound, StorageError
from pagemill.jobs.recover import restore_all
from pagemill.jobs.state import new_nonce
from pagemill.jobs.storage import Storage, decide


async def submitted(client: Client) -> tuple[Job, str]:
    model = unique("model")
    return await client.submit(["a", "b"], model=model, job_id=unique("job")), model


def left(storage: Storage, job: Job) -> list[str]:
    return [info.key for info in storage.list(layout.root(job.id))]


async def gone(client: Client, job: Job) -> None:
    assert left(client.storage, job) == [layout.tombstone(job.id)]
    with pytest.raises(JobNotFound):
        await client.status(job)
    with pytest.raises(JobNotFound):
        await client.results(job).list()
    with pytest.raises(JobConflict, match="was deleted"):
        await client.submit(["a", "b"], model="any", job_id=job.id)
    with pytest.raises(JobConflict, match="was deleted"):
        await client.recover(job)
    assert job.id not in [status.job for status in await client.list(limit=1000)]


async def test_an_ended_job_goes_with_everything_of_it(client: Client) -> None:
    job, model = await submitted(client)
    await work(await client.state(), client.storage, model)
    await client.delete(job)
    await gone(client, job)
    await client.delete(job)


async def test_a_job_that_runs_is_refused_unless_forced(client: Client) -> None:
    job, model = await submitted(client)
    await work(await client.state(), client.storage, model, tasks=1)
    with pytest.raises(JobConflict, match="in_progress: cancel it first"):
        await client.delete(job)
    await client.delete(job, force=True)
    await gone(client, job)


async def test_a_job_that_redis_lost_goes_too(client: Client) -> None:
    state = await client.state()
    running, _ = await submitted(client)
    ended, model = await submitted(client)
    await work(state, client.storage, model)
    for job in (running, ended):
        await state.redis.delete(*await state.redis.keys(f"{state.key(job.id)}*"))
    with pytest.raises(JobConflict, match="Redis has lost it"):
        await client.delete(running)
    await client.delete(ended)
    await client.delete(running, force=True)
    await gone(client, ended)
    await gone(client, running)
    assert await restore_all(state, client.storage) == []


async def test_a_job_that_never_was_is_not_found(client: Client) -> None:
    for force in (False, True):
        with pytest.raises(JobNotFound):
            await client.delete("job-none", force=force)


async def test_what_a_failure_left_goes_when_it_is_deleted_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, model = await submitted(client)
    await work(await client.state(), client.storage, model)
    with monkeypatch.context() as broken:
        broken.setattr(client.storage, "delete", lambda keys: _refuse())
        with pytest.raises(StorageError):
            await client.delete(job)
    with pytest.raises(JobConflict, match="was deleted"):
        await client.submit(["a", "b"], model="any", job_id=job.id)
    await client.delete(job)
    await gone(client, job)


def _refuse() -> None:
    raise StorageError("The store refuses.")


async def test_a_tombstone_counts_against_a_redis_that_thinks_the_job_runs(client: Client) -> None:
    """Restored from an older copy, it may not hold up what was decided in the store."""
    job, model = await submitted(client)
    state = await client.state()
    await work(state, client.storage, model, tasks=1)
    assert not await forget_deleted(state, client.storage, job.id)
    decide(client.storage, layout.tombstone(job.id), {"job": job.id})
    await client.delete(job)
    await gone(client, job)
    assert await state.redis.keys(f"{state.key(job.id)}*") == [f"{state.key(job.id)}:tombstone".encode()]
    assert await state.lease(model, worker="w", nonce=new_nonce(), ttl_ms=1000) is None
    assert not await state.redis.sismember("pagemill:models", model)
    assert await forget_deleted(state, client.storage, job.id)
