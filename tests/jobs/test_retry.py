"""The failed rows of a job as a new job: the same rows, ids and seeds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_worker import unique, work

from pagemill.jobs import layout
from pagemill.jobs.client import Client, Job
from pagemill.jobs.errors import JobConflict, JobNotFound, UsageError
from pagemill.jobs.plan import read_shard
from pagemill.jobs.storage import read_json
from pagemill.jobs.submission import read_spec

LINES: list[Any] = [
    {"prompt": "a"},
    {"prompt": "b", "custom_id": "mine", "seed": 5, "stop": "x", "logit_bias": {"7": -2}, "logprobs": 3},
    {"prompt": [1, 2, 3], "temperature": 0, "metadata": {"k": [1, None]}, "model": "gpt-4"},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "logprobs": False},
    {"prompt": "no such", "colour": "red"},
    {"messages": [{"role": "user", "content": "w"}], "max_completion_tokens": 3, "top_p": 0.5, "n": 2},
]


async def rows_by_id(client: Client, job: Job) -> dict[str, dict[str, Any]]:
    """Everything of the rows that were to run, but their place in the file."""
    plan = await asyncio.to_thread(read_json, client.storage, layout.plan(job.id))
    assert plan is not None
    rows = [row for entry in plan["shards"] for row in read_shard(client.storage, entry)]
    place = ("row_index", "line", "filled_id")
    return {row.custom_id: {k: v for k, v in row.to_dict().items() if k not in place} for row in rows}


async def stopped(client: Client, model: str, *, tasks: int, **more: Any) -> Job:
    """A job of which so many tasks were done before somebody cancelled it."""
    job = await client.submit(LINES, model=model, shard_rows=1, max_tokens=9, logprobs=2, **more)
    await work(await client.state(), client.storage, model, tasks=tasks)
    assert (await client.cancel(job)).state == "cancelled"
    return job


async def test_rows_that_were_not_run_run_again_as_they_were(client: Client) -> None:
    model = unique("model")
    job = await stopped(client, model, tasks=1 + 2, priority=3)
    before = {row.custom_id: row async for row in client.results(job)}
    again = await client.retry_failed(job)
    await work(await client.state(), client.storage, model)
    assert (await client.wait(again)).completed == 3
    after = {row.custom_id: row async for row in client.results(again)}
    not_run = {name for name, row in before.items() if row.error_code == "batch_cancelled"}
    assert after.keys() == not_run
    assert len(not_run) == 3
    old, new = await rows_by_id(client, job), await rows_by_id(client, again)
    assert new == {name: old[name] for name in not_run}
    spec = read_spec(client.storage, again.id)
    assert spec is not None
    assert (spec.retry_of, spec.priority, spec.model) == (job.id, 3, model)


async def test_every_shape_and_parameter_survives(client: Client) -> None:
    model = unique("model")
    job = await stopped(client, model, tasks=1)
    again = await client.retry_failed(job)
    await work(await client.state(), client.storage, model)
    assert await rows_by_id(client, again) == await rows_by_id(client, job)


async def test_the_same_id_is_the_same_retry(client: Client) -> None:
    job = await stopped(client, unique("model"), tasks=2)
    first = await client.retry_failed(job, job_id=f"{job.id}-again")
    second = await client.retry_failed(job, job_id=f"{job.id}-again")
    assert (first.existed, second.existed) == (False, True)
    with pytest.raises(JobConflict, match="has not ended"):
        await client.retry_failed(first)


async def test_what_cannot_be_retried_is_said(client: Client) -> None:
    model = unique("model")
    job = await client.submit(LINES, model=model)
    with pytest.raises(JobConflict, match="has not ended"):
        await client.retry_failed(job)
    await work(await client.state(), client.storage, model)
    with pytest.raises(UsageError, match=r"\(unsupported_parameter 1\): mend their lines and submit those"):
        await client.retry_failed(job)
    with pytest.raises(UsageError, match="fails again: mend its line"):
        await client.retry_failed(job, codes=["unsupported_parameter"])
    with pytest.raises(UsageError, match="no code of a row"):
        await client.retry_failed(job, codes=["whatever"])
    with pytest.raises(JobNotFound):
        await client.retry_failed("job-none")


async def test_a_retry_outlives_the_job_it_came_from(client: Client) -> None:
    model = unique("model")
    job = await stopped(client, model, tasks=1)
    again = await client.retry_failed(job)
    await client.delete(job)
    await work(await client.state(), client.storage, model)
    assert (await client.wait(again)).completed == 5


async def test_a_job_that_was_stopped_before_its_plan_has_no_rows_and_says_what_to_do(client: Client) -> None:
    job = await client.submit(LINES, model=unique("model"))
    assert (await client.cancel(job)).state == "cancelled"
    assert await client.results(job).list() == []
    with pytest.raises(
        UsageError, match=r"was cancelled before its lines became rows.*submit its input again"
    ) as no:
        await client.retry_failed(job)
    place = str(no.value).rpartition("; ")[2].removesuffix(" holds it.")
    again = await client.submit(place, model=unique("model"))
    assert (await client.cancel(again)).state == "cancelled"


async def test_a_job_whose_file_was_refused_says_so_when_it_is_retried(client: Client) -> None:
    model = unique("model")
    job = await client.submit(LINES, model=model, strict=True)
    await work(await client.state(), client.storage, model)
    with pytest.raises(
        UsageError, match=r"failed before its lines became rows \(unsupported_parameter\).*mend"
    ):
        await client.retry_failed(job)
