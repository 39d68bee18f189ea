"""Commands for jobs that have ended: delete, report, retry-failed.

They join the program like those of other floors. This room may not know how a job is deleted or made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagemill.jobs import options, render
from pagemill.jobs.commands import app, run_async
from pagemill.jobs.failures import EXIT_CODES


@app.command(epilog=EXIT_CODES)
def delete(
    job: options.JobId,
    force: Annotated[bool, typer.Option("--force", help="Cancel it first if it runs.")] = False,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    store: options.Store = None,
    s3_endpoint: options.Endpoint = None,
    s3_region: options.Region = None,
) -> None:
    """Delete a job with its input and its results. Its id is not used again. Harmless to repeat."""

    async def work() -> None:
        async with options.client(redis_url, store, s3_endpoint, s3_region) as client:
            await client.delete(job, force=force)

    run_async(work(), f"Interrupted. Job {job} may be half deleted: pagemill delete {job} goes on.")
    if as_json:
        render.print_json({"job": job, "deleted": True})
    else:
        print(f"{job} is deleted.")


@app.command("retry-failed", epilog=EXIT_CODES)
def retry_failed(
    job: options.JobId,
    code: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE",
            help="Only rows with this error code, may be repeated; by default those that were not run, and "
            "result_lost and engine_error.",
        ),
    ] = None,
    job_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Chosen by you: the same again is the same job.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="30m, 2h, 1d, or a moment with its zone.")
    ] = None,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    store: options.Store = None,
    s3_endpoint: options.Endpoint = None,
    s3_region: options.Region = None,
) -> None:
    """Make a new job of the rows of an ended one that failed and may succeed; prints its id.

    Rows keep their ids and seeds. Lines that are no requests fail again and are left out.
    """
    limit = options.deadline(deadline)

    async def work() -> tuple[str, bool]:
        async with options.client(redis_url, store, s3_endpoint, s3_region) as client:
            made = await client.retry_failed(job, codes=code, job_id=job_id, deadline=limit)
            return made.id, made.existed

    made, existed = run_async(work())
    if as_json:
        render.print_json({"job": made, "retry_of": job, "existed": existed})
    else:
        print(made)


@app.command(epilog=EXIT_CODES)
def report(
    job: options.JobId,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write; by default JOB.html.", show_default=False),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(min=0, help="Of a GPU for an hour: adds an estimate of the cost.", show_default=False),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="How many worked at once.")] = 1,
    store: options.Store = None,
    s3_endpoint: options.Endpoint = None,
    s3_region: options.Region = None,
) -> None:
    """Write what became of a job as one HTML file: throughput, lengths, errors, cache hits, cost.

    The file loads nothing from anywhere. Reads the store alone: Redis may be gone.
    """
    from pagemill.jobs.publish import output_file
    from pagemill.jobs.report import Price, gather
    from pagemill.jobs.report_page import page

    cost = None if price is None else Price(price, gpus)
    path = output or Path(f"{job}.html")
    found = gather(options.client(None, store, s3_endpoint, s3_region).storage, job)
    with output_file(path) as file:
        file.write(page(found, cost).encode())
    print(path)
