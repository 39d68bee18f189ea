"""The command that takes a job's rows away: results.

It joins the program like those of other floors. This room may not know how rows are read or written.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pagemill.jobs import options
from pagemill.jobs.client import Client
from pagemill.jobs.commands import app, run_async
from pagemill.jobs.errors import JobNotFound, PagemillError, UsageError
from pagemill.jobs.failures import EXIT_CODES


class Format(StrEnum):
    """How results are written."""

    table = "table"
    jsonl = "jsonl"
    csv = "csv"
    parquet = "parquet"
    openai = "openai"


@app.command(epilog=EXIT_CODES)
def results(
    job: options.JobId,
    format: Annotated[
        Format,
        typer.Option(
            "--format", "-f", help="A line a row for people; one file of all rows; OpenAI's two files."
        ),
    ] = Format.table,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write there instead; parquet needs it.", show_default=False),
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option(
            help="With openai: where failed rows go; by default beside answers.jsonl, answers.errors.jsonl.",
            show_default=False,
        ),
    ] = None,
    csv_safe: Annotated[
        bool,
        typer.Option(
            "--csv-safe",
            help="With csv, for a spreadsheet: an apostrophe before texts that begin as formulas do, with "
            "=, +, -, @, tab or a line break. Without it they stay as the model said them.",
        ),
    ] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="What is committed so far of a job that runs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format jsonl.")] = False,
    redis_url: options.RedisUrl = None,
    store: options.Store = None,
    s3_endpoint: options.Endpoint = None,
    s3_region: options.Region = None,
) -> None:
    """Print a job's rows in input order. Reads the store alone: Redis may be gone."""
    from pagemill.jobs import export

    if errors is not None and format is not Format.openai:
        raise UsageError("--errors goes with --format openai.")
    if csv_safe and (as_json or format is not Format.csv):
        raise UsageError("--csv-safe goes with --format csv.")
    if as_json and format not in (Format.table, Format.jsonl):
        raise UsageError(f"--json is --format jsonl, and does not go with {format}.")
    client = options.client(redis_url, store, s3_endpoint, s3_region)
    rows = client.results(job, partial=partial).sync
    try:
        if format is Format.openai:
            export.export_openai(rows, output, errors)
        elif as_json or format is Format.jsonl:
            export.export_rows(rows.write_jsonl, output)
        elif format is Format.csv:
            export.export_rows(lambda file: rows.write_csv(file, safe=csv_safe), output)
        elif format is Format.parquet:
            export.export_parquet(rows, output)
        else:
            export.export_table(rows, output)
    except JobNotFound as error:
        elsewhere = run_async(_output_of(client, job))
        if elsewhere is None:
            raise
        raise JobNotFound(f"{str(error).rstrip('.')}; Redis says that it is {elsewhere}.") from None


async def _output_of(client: Client, job: str) -> str | None:
    """Where Redis, if it is there, says that the job's results are; None where it says nothing of it."""
    try:
        async with client:
            return (await client.status(job)).output
    except PagemillError:
        return None
