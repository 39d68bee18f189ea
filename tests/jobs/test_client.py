"""The client against a real Redis and a local store: following jobs, cancelling them, and
whatever happens on the way."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_worker import finish, say_alive, seal_some, take, work

from pagemill.jobs import layout
from pagemill.jobs.client import Client, Job
from pagemill.jobs.errors import (
    JobConflict,
    JobFailed,
    JobNotFound,
    ProtocolMismatch,
    RedisUnavailable,
    StorageError,
    UsageError,
)
from pagemill.jobs.result import SCHEMA
from pagemill.jobs.storage import read_json

# following


async def test_watching_shows_every_change_up_to_the_end(client: Client, model: str) -> None:
    job = await client.submit(["a", "b"], model=model)
    working = asyncio.create_task(finish(client, model))
    seen = [status async for status in job.watch(poll=0.05)]
    await working
    assert seen[-1].state == "completed"
    order = ["validating", "in_progress", "finalizing", "completed"]
    places = [order.index(status.state) for status in seen]
    assert places == sorted(places)
    assert all(a != b for a, b in pairwise(seen))


async def test_a_watcher_waits_for_a_redis_that_is_away(
    redis_server: Any, tmp_path: Path, model: str
) -> None:
    async with Client(redis_server.url, str(tmp_path / "store"), patience=0.2) as client:
        job = await client.submit(["a"], model=model)
        seen: list[str] = []

        async def watch() -> None:
            async for status in job.watch(poll=0.05):
                seen.append(status.state)

        watching = asyncio.create_task(watch())
        while not seen:
            await asyncio.sleep(0.01)
        redis_server.kill()
        with pytest.raises(RedisUnavailable):
            await client.status(job)
        redis_server.start()
        while await work(await client.state(), client.storage, model) == 0:
            await asyncio.sleep(0.05)
        await watching
        assert seen[-1] == "completed"


async def test_waiting_has_a_limit_and_leaves_the_job_alone(client: Client, model: str) -> None:
    job = await client.submit(["a"], model=model)
    with pytest.raises(TimeoutError, match="goes on"):
        await job.wait(timeout=0.05)
    assert (await job.status()).state == "validating"


async def test_a_failed_job_says_why(client: Client, model: str) -> None:
    job = await client.submit([], model=model)
    await finish(client, model)
    assert (await job.wait()).error_code == "empty_file"
    with pytest.raises(JobFailed, match="no line") as caught:
        await job.wait(check=True)
    assert caught.value.code == "empty_file"


async def test_results_of_a_running_job_are_partial_or_refused(client: Client, model: str) -> None:
    job = await client.submit(["a", {"prompt": 1}], model=model)
    await work(await client.state(), client.storage, model, tasks=1)
    with pytest.raises(JobConflict, match="not ended"):
        await job.results().list()
    assert [row.row_index async for row in job.results(partial=True)] == [1]
    await finish(client, model)
    assert [row.row_index async for row in job.results(partial=True)] == [0, 1]


async def test_results_come_as_arrow_too(client: Client, model: str) -> None:
    job = await client.submit([f"p{i}" for i in range(700)], model=model)
    await finish(client, model)
    table = await job.results().table()
    assert table.schema == SCHEMA
    assert table.column("row_index").to_pylist() == list(range(700))
    assert sum([batch.num_rows async for batch in job.results().batches()]) == 700
    assert [row.row_index async for row in job.results()] == list(range(700))


async def test_unknown_jobs_are_not_found(client: Client) -> None:
    for call in (client.status, client.cancel, client.wait):
        with pytest.raises(JobNotFound):
            await call("job-that-never-was")
    with pytest.raises(JobNotFound):
        await client.results("job-that-never-was").list()
    with pytest.raises(UsageError):
        await client.status("no/id")


async def test_listing_filters_by_state_and_model(client: Client, model: str) -> None:
    jobs: list[Job] = [await client.submit(["a"], model=model) for _ in range(3)]
    await client.cancel(jobs[0])
    assert [found.job for found in await client.list(model=model)] == [job.id for job in reversed(jobs)]
    assert [found.job for found in await client.list(model=model, state="cancelled")] == [jobs[0].id]
    assert len(await client.list(model=model, limit=2)) == 2


# cancelling (D20)


async def test_a_job_is_cancelled_before_any_worker_ran(client: Client, model: str) -> None:
    job = await client.submit(["a", "b"], model=model)
    outcome = await job.cancel()
    assert (outcome.state, outcome.accepted) == ("cancelled", True)
    status = await job.status()
    assert (status.state, status.total) == ("cancelled", 0)
    assert await job.results().list() == []
    assert (await job.cancel()).accepted  # and again
    assert await work(await client.state(), client.storage, model) == 0


async def test_cancelling_keeps_what_is_finished(client: Client, model: str) -> None:
    job = await client.submit(["a", "b", "c", "d", {"prompt": 0}], model=model)
    state = await client.state()
    await work(state, client.storage, model, tasks=1)
    lease = await take(state, model)
    assert lease is not None
    await seal_some(state, client.storage, lease, 3)
    outcome = await job.cancel()
    assert (outcome.state, outcome.accepted) == ("cancelled", True)
    rows = await job.results().list()
    assert [row.row_index for row in rows] == [0, 1, 2, 3, 4]
    codes = sorted(row.error_code or "" for row in rows)
    assert codes == ["", "", "", "batch_cancelled", "invalid_request"]
    status = await job.status()
    assert (status.total, status.completed, status.failed) == (5, 3, 2)


async def test_a_live_worker_is_left_to_drain_the_job(client: Client, model: str) -> None:
    job = await client.submit(["a"], model=model)
    state = await client.state()
    worker = await say_alive(state, model)
    outcome = await job.cancel()
    assert (outcome.state, outcome.accepted) == ("cancelling", True)
    assert read_json(client.storage, layout.stop(job.id)) is not None
    await state.goodbye(worker)
    assert (await job.cancel()).state == "cancelled"


async def test_what_has_ended_is_not_cancelled(client: Client, model: str) -> None:
    job = await client.submit(["a"], model=model)
    await finish(client, model)
    outcome = await job.cancel()
    assert (outcome.state, outcome.accepted) == ("completed", False)
    assert read_json(client.storage, layout.stop(job.id)) is None


# surroundings


async def test_redis_down_is_one_sentence_and_nothing_is_uploaded(tmp_path: Path) -> None:
    async with Client("redis://127.0.0.1:1/0", str(tmp_path / "store"), patience=0.1) as client:
        with pytest.raises(RedisUnavailable, match=r"127\.0\.0\.1:1"):
            await client.submit(["a"], model="m")
        assert not list(client.storage.list("jobs/"))


async def test_another_protocol_is_refused(redis_server: Any, tmp_path: Path) -> None:
    async with Client(redis_server.url, str(tmp_path)) as client:
        state = await client.state()
        await state.redis.set("pagemill:protocol", "99")
    async with Client(redis_server.url, str(tmp_path)) as client:
        with pytest.raises(ProtocolMismatch):
            await client.list()


def test_addresses_are_checked_when_the_client_is_made() -> None:
    with pytest.raises(UsageError, match="not a Redis address"):
        Client("http://localhost:6379")
    with pytest.raises(StorageError, match="no store"):
        Client("redis://localhost", "gs://bucket")


async def test_a_store_that_cannot_be_written_is_said(redis_url: str, tmp_path: Path, model: str) -> None:
    (tmp_path / "file").write_text("in the way")
    async with Client(redis_url, str(tmp_path / "file" / "store")) as client:
        with pytest.raises(StorageError):
            await client.submit(["a"], model=model)
