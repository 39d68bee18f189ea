"""Who waits for an engine with a model, as a worker sees it that might load it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_worker import TTL_MS, do, take, unique, work

from pagemill.jobs.client import Client
from pagemill.jobs.script import connection
from pagemill.jobs.state import State, new_nonce
from pagemill.jobs.status import Want, WorkerInfo


@pytest.fixture
async def client(redis_url: str, tmp_path: Path) -> AsyncIterator[Client]:
    async with Client(redis_url, str(tmp_path)) as opened:
        yield opened


@pytest.fixture
async def state(redis_url: str) -> AsyncIterator[State]:
    opened = State(connection(redis_url))
    yield opened
    await opened.close()


async def planned(client: Client, state: State, model: str, **more: object) -> str:
    job = await client.submit(["a", "b"], model=model, **more)  # type: ignore[arg-type]
    lease = await take(state, model, job=job.id)
    assert lease is not None
    await do(state, client.storage, lease)
    return job.id


async def says(redis: State, model: str, **more: object) -> str:
    name = unique("worker")
    info = WorkerInfo(worker=name, models=(model,), **{"state": "ready", **more})  # type: ignore[arg-type]
    await redis.heartbeat(info, 60_000)
    return name


async def test_a_planned_job_waits_and_one_without_a_plan_does_not(client: Client, state: State) -> None:
    """A plan needs no engine, and is made by workers that have another model loaded."""
    model = unique("m")
    await client.submit(["a"], model=model)
    assert await state.wanted(model, "me") == Want()
    await work(state, client.storage, model, tasks=1)
    assert await state.wanted(model, "me") == Want(jobs=1, unserved=1, alone=1)


async def test_the_highest_priority_is_told(client: Client, state: State) -> None:
    model = unique("m")
    for priority in (1, 7, 3):
        await planned(client, state, model, priority=priority)
    found = await state.wanted(model, "me")
    assert (found.jobs, found.priority) == (3, 7)


@pytest.mark.parametrize(
    ("other", "unserved", "alone", "loaded"),
    [
        ({}, 1, 0, 0),  # it may load the model, and has another one
        ({"loaded": "self"}, 0, 0, 1),
        ({"loaded": "self", "state": "starting"}, 0, 0, 1),
        ({"loaded": "self", "state": "sick"}, 1, 1, 0),
        ({"loaded": "self", "state": "draining"}, 1, 1, 0),
        ({"loaded": "self", "context": 10}, 1, 1, 1),
        ({"loaded": "self", "context": 4096}, 0, 0, 1),
    ],
)
async def test_a_job_is_served_by_whoever_could_take_it(
    client: Client, state: State, other: dict[str, object], unserved: int, alone: int, loaded: int
) -> None:
    model = unique("m")
    if other.get("loaded"):
        other = {**other, "loaded": model}
    await planned(client, state, model, context=100)
    await says(state, model, **other)
    assert await state.wanted(model, "me") == Want(1, unserved, alone=alone, loaded=loaded)


async def test_weights_that_do_not_suit_are_no_help_and_no_want(client: Client, state: State) -> None:
    model = unique("m")
    job = await planned(client, state, model)
    await state.runs_on(job, "fp")
    await says(state, model, loaded=model, fingerprint="others")
    assert await state.wanted(model, "me") == Want(jobs=1, unserved=1, alone=1, loaded=1)
    assert await state.wanted(model, "me", "others", 0) == Want(loaded=1), (
        "we would be refused: no reason to load"
    )
    assert await state.wanted(model, "me", "fp", 0) == Want(jobs=1, unserved=1, alone=1, loaded=1)


async def test_what_somebody_works_on_is_served(client: Client, state: State) -> None:
    model = unique("m")
    job = await client.submit([f"p{i}" for i in range(40)], model=model, shard_rows=10)
    await work(state, client.storage, model, tasks=1)
    lease = await take(state, model)
    assert lease is not None
    assert await state.wanted(model, "me") == Want(jobs=1, unserved=0)
    await state.release(job.id, lease.task, lease.fence)
    assert await state.wanted(model, "me") == Want(jobs=1, unserved=1, alone=1)


async def test_a_stopped_job_needs_no_engine(client: Client, state: State) -> None:
    model = unique("m")
    job = await planned(client, state, model)
    await state.stop(job, "cancelled")
    assert await state.wanted(model, "me") == Want()
    lease = await state.lease(model, worker="me", nonce=new_nonce(), ttl_ms=TTL_MS)
    assert lease is not None
