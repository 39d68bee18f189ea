"""Results as people take them away: printed, or in files that appear whole or not at all.

This room knows formats and file names, and may not know where the rows are read.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

from pagemill.jobs import render
from pagemill.jobs.errors import UsageError
from pagemill.jobs.publish import output_file
from pagemill.jobs.reading import Results


def export_table(results: Results, output: Path | None) -> None:
    """A line a row, for people."""
    if output is not None:
        raise UsageError(
            "--output takes --format csv, parquet, jsonl or openai; a table is for reading here."
        )
    if not render.print_results(results):
        render.say("No rows.")


def export_rows(write: Callable[[BinaryIO], int], output: Path | None) -> None:
    """Every row by one of `Results`' writers, into a file or to standard output."""
    with _opened(output) as file:
        count = write(file)
    if output is not None:
        render.say(f"{count:,} rows in {output}")


def export_parquet(results: Results, output: Path | None) -> None:
    """All rows as one Parquet file, which is no text for standard output."""
    if output is None or str(output) == "-":
        raise UsageError("--format parquet needs --output FILE.")
    export_rows(results.write_parquet, output)


def export_openai(results: Results, output: Path | None, errors: Path | None) -> None:
    """OpenAI's two files. Failed rows that have no place to go are at least counted, on standard error."""
    beside = errors or (output and output.with_name(f"{output.stem}.errors.jsonl"))
    with _opened(output) as file, _opened(beside) if beside else nullcontext(_Nowhere()) as faults:
        completed, failed = results.write_openai(file, faults)
    if output is not None:
        render.say(f"{completed:,} completed rows in {output}, {failed:,} failed rows in {beside}")
    elif beside is not None:
        render.say(f"{failed:,} failed rows in {beside}")
    elif failed:
        render.say(f"{failed:,} failed rows are not shown; --errors FILE takes them.")


class _Nowhere(io.BytesIO):
    """Takes bytes and keeps none."""

    def write(self, data: object) -> int:
        return memoryview(data).nbytes  # type: ignore[arg-type]


@contextmanager
def _opened(path: Path | None) -> Iterator[BinaryIO]:
    """The file, or standard output; rows are UTF-8 whatever the terminal speaks."""
    if path is None or str(path) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with output_file(path) as file:
        yield file
