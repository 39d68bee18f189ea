"""Commands that look at jobs and workers and change nothing: status, watch, list, workers.

They join the program like those of other floors. This room may not know how anything is shown.
"""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

from pagemill.jobs import options, render, render_workers
from pagemill.jobs.commands import app, follow, run_async
from pagemill.jobs.errors import UsageError
from pagemill.jobs.failures import EXIT_CODES
from pagemill.jobs.status import STATES, JobStatus, WorkerInfo


class StatusFormat(StrEnum):
    """How a status is written."""

    text = "text"
    json = "json"
    openai = "openai"


@app.command(epilog=EXIT_CODES)
def status(
    job: options.JobId,
    format: Annotated[
        StatusFormat, typer.Option("--format", "-f", help="openai: as OpenAI's batch object.")
    ] = StatusFormat.text,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    redis_url: options.RedisUrl = None,
    store: options.Store = None,
    s3_endpoint: options.Endpoint = None,
    s3_region: options.Region = None,
) -> None:
    """Show a job as it is now."""

    if as_json and format is StatusFormat.openai:
        raise UsageError("--json is --format json, and does not go with openai.")

    async def work() -> JobStatus | dict[str, Any]:
        async with options.client(redis_url, store, s3_endpoint, s3_region) as client:
            if format is StatusFormat.openai:
                return await client.openai_batch(job)
            return await client.status(job)

    found = run_async(work())
    if not isinstance(found, JobStatus):
        render.print_json(found)
    elif as_json or format is StatusFormat.json:
        render.print_json(render.status_document(found))
    else:
        render.print_status(found)


@app.command(epilog=EXIT_CODES)
def watch(
    job: options.JobId,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    store: options.Store = None,
    s3_endpoint: options.Endpoint = None,
    s3_region: options.Region = None,
) -> int:
    """Follow a job until it ends: bars on a terminal, lines when piped, one JSON document a change with
    --json.

    Ends with 0 when the job completed, else with 9.
    """

    async def work() -> int:
        async with options.client(redis_url, store, s3_endpoint, s3_region) as client:
            return await follow(client, job, as_json)

    return run_async(work())


@app.command("list", epilog=EXIT_CODES)
def list_jobs(
    state: Annotated[str | None, typer.Option(help="Only jobs in this state.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Only jobs of this model.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most so many.")] = 50,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    store: options.Store = None,
    s3_endpoint: options.Endpoint = None,
    s3_region: options.Region = None,
) -> None:
    """List the jobs that Redis knows, newest first."""
    if state is not None and state not in STATES:
        raise UsageError(f"{state} is no state; there are {', '.join(sorted(STATES))}.")

    async def work() -> list[JobStatus]:
        async with options.client(redis_url, store, s3_endpoint, s3_region) as client:
            return await client.list(limit=limit, state=state, model=model)

    found = run_async(work())
    if as_json:
        render.print_json([render.status_document(job) for job in found])
    else:
        render.print_jobs(found)
        if not found:
            render.say("No such jobs.")


@app.command(epilog=EXIT_CODES)
def workers(
    model: Annotated[str | None, typer.Option("--model", "-m", help="Only those that may load it.")] = None,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    store: options.Store = None,
    s3_endpoint: options.Endpoint = None,
    s3_region: options.Region = None,
) -> None:
    """List the workers that said lately that they live: what they serve, and what they are doing."""

    async def work() -> list[WorkerInfo]:
        async with options.client(redis_url, store, s3_endpoint, s3_region) as client:
            return await client.workers()

    found = [worker for worker in run_async(work()) if model is None or model in worker.models]
    if as_json:
        render.print_json([asdict(worker) for worker in found])
    else:
        render_workers.print_workers(found)
        if not found:
            render.say("No such workers; pagemill worker --model MODEL starts one.")
