"""A stop and an end that cross: the state machine decides which came first, and the manifest says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
from fake_worker import do, take, work

from pagemill.jobs import layout, stopping
from pagemill.jobs.client import Client, Job
from pagemill.jobs.recover import restore
from pagemill.jobs.state import State
from pagemill.jobs.status import Lease
from pagemill.jobs.stopping import stop_job
from pagemill.jobs.storage import Storage, decide, read_json

STOP = {"reason": "cancelled", "at": 1.0}


async def about_to_finalize(client: Client, model: str) -> tuple[Job, State, Lease]:
    """Its last shard is committed in the store, and Redis is told at the next call of `do`."""
    job = await client.submit(["a", "b"], model=model)
    state = await client.state()
    await work(state, client.storage, model, tasks=1)
    lease = await take(state, model)
    assert lease is not None
    return job, state, lease


def manifest(client: Client, job: Job) -> dict[str, Any]:
    found = read_json(client.storage, layout.manifest(job.id))
    assert found is not None
    return found


async def test_a_cancel_that_its_jobs_end_overtakes_is_refused_and_changes_nothing(
    client: Client, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last shard is committed after the canceller looked at the state, before its stop.json is there."""
    job, state, lease = await about_to_finalize(client, model)
    seen = await job.status()
    await do(state, client.storage, lease)

    class Late:
        """The state as the canceller sees it: the look it took was before the end."""

        async def status(self, job: str) -> object:
            return seen

        async def stop(self, *args: Any) -> object:
            return await state.stop(*args)

    outcome = await stop_job(cast(State, Late()), client.storage, job.id, "cancelled")
    assert (outcome.accepted, outcome.state) == (False, "finalizing")
    assert read_json(client.storage, layout.stop(job.id)) is not None
    await work(state, client.storage, model)
    assert manifest(client, job)["state"] == "completed"
    assert (await job.status()).state == "completed"
    assert not (await job.cancel()).accepted


async def test_what_finalizes_is_not_told_to_stop(client: Client, model: str) -> None:
    """No worker is left to finalize it, so the canceller does, and it ends as what it is."""
    job, state, lease = await about_to_finalize(client, model)
    await do(state, client.storage, lease)
    outcome = await job.cancel()
    assert (outcome.accepted, outcome.state) == (False, "completed")
    assert read_json(client.storage, layout.stop(job.id)) is None


async def test_cancelling_again_finishes_what_a_dead_canceller_left_to_finalize(
    client: Client, model: str
) -> None:
    job, state, lease = await about_to_finalize(client, model)
    decide(client.storage, layout.stop(job.id), STOP)
    await state.stop(job.id, "cancelled")
    await do(state, client.storage, lease)
    assert (await job.status()).state == "finalizing"
    outcome = await job.cancel()
    assert (outcome.accepted, outcome.state) == (True, "cancelled")


async def test_an_accepted_stop_counts_though_every_row_ran(client: Client, model: str) -> None:
    job, state, lease = await about_to_finalize(client, model)
    await stop_job(state, client.storage, job.id, "cancelled")
    await do(state, client.storage, lease)  # its worker had no row left when it heard of it
    await work(state, client.storage, model)
    assert (manifest(client, job)["state"], manifest(client, job)["completed"]) == ("cancelled", 2)
    assert (await job.status()).state == "cancelled"


async def test_a_stop_that_redis_forgot_counts_by_the_rows_it_left(client: Client, model: str) -> None:
    """Redis came back as an older copy, which knows neither the stop nor the shards that it ended."""
    job, state, lease = await about_to_finalize(client, model)
    decide(client.storage, layout.stop(job.id), STOP)
    plan = read_json(client.storage, layout.plan(job.id))
    assert plan is not None
    await state.stop(job.id, "cancelled")
    await state.release(lease.job, lease.task, lease.fence)
    stopped = await take(state, model)
    assert stopped is not None
    await do(state, client.storage, stopped)
    found = stopping.stop_that_counts(client.storage, job.id, plan)
    assert found is not None
    assert found["reason"] == "cancelled"


@pytest.mark.parametrize("told", [True, False])
async def test_a_rebuild_goes_by_a_late_stop_as_little_as_its_job_did(
    client: Client, model: str, told: bool
) -> None:
    job, state, lease = await about_to_finalize(client, model)
    await do(state, client.storage, lease)
    decide(client.storage, layout.stop(job.id), STOP)
    if told:
        assert not (await state.stop(job.id, "cancelled")).accepted
    await forget(state, job.id)
    assert (await restore(state, client.storage, job.id)).state == "finalizing"
    await work(state, client.storage, model)
    assert (await job.status()).state == "completed"


@pytest.mark.parametrize("plan", [None, {"shards": [], "stopped": "cancelled"}, {"shards": [{"shard": 0}]}])
def test_a_stop_of_what_is_not_all_run_counts(local_storage: Storage, plan: Mapping[str, Any] | None) -> None:
    decide(local_storage, layout.stop("job-x"), STOP)
    assert stopping.stop_that_counts(local_storage, "job-x", plan) == STOP


def test_a_stop_that_redis_alone_knows_counts(local_storage: Storage) -> None:
    plan: dict[str, Any] = {"shards": []}
    found = stopping.stop_that_counts(local_storage, "job-x", plan, "expired")
    assert found == {"reason": "expired"}


async def forget(state: State, job: str) -> None:
    """Redis loses everything of one job."""
    keys = await state.redis.keys(f"{state.key(job)}*".replace("{", "[{]").replace("}", "[}]"))
    assert keys
    await state.redis.delete(*keys)
