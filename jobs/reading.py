"""A job's results as Python wants them: rows, lists, Arrow tables, record batches and files, in input order.

Two faces of one thing: `Results` blocks and is iterated with `for`; `AsyncResults` wraps one and is iterated
with `async for`, reading in a thread. Both are lazy, may be read again, and hold one bounded merge at a time.
This room may not know Redis: results are read from the store alone, so they outlive it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from pagemill.jobs.errors import UsageError
from pagemill.jobs.publish import output_file
from pagemill.jobs.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

    from pagemill.jobs.result import ResultRow

# Arrow takes a quarter of a second to load, which submitting and asking for a status need not pay: it is
# imported where rows are read.

T = TypeVar("T")
ROWS_A_HOP = 256


class Results:
    """Rows of one job in input order.

    partial: read what is committed so far, in the same order and with gaps; otherwise reading a job that has
    not ended raises JobConflict. Any read raises JobNotFound where the store has no such job, and
    StorageError.
    """

    def __init__(self, storage: Storage, job: str, *, partial: bool = False) -> None:
        self.storage = storage
        self.job = job
        self.partial = partial

    def __iter__(self) -> Iterator[ResultRow]:
        from pagemill.jobs.results import iter_results

        return iter_results(self.storage, self.job, partial=self.partial)

    def list(self) -> list[ResultRow]:
        """All rows in memory."""
        return list(self)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows as Arrow record batches of one explicit schema (`pagemill.jobs.result.SCHEMA`)."""
        from pagemill.jobs.results import iter_batches

        return iter_batches(self.storage, self.job, partial=self.partial)

    def table(self) -> pa.Table:
        """All rows as one Arrow table, from which polars.from_arrow goes on; for pandas see `pandas`."""
        import pyarrow as pa

        from pagemill.jobs.result import SCHEMA

        return pa.Table.from_batches(self.batches(), SCHEMA)

    def reader(self) -> pa.RecordBatchReader:
        """All rows as a record-batch stream, for pyarrow.dataset, DuckDB, or a writer: bounded memory."""
        import pyarrow as pa

        from pagemill.jobs.result import SCHEMA

        return pa.RecordBatchReader.from_batches(SCHEMA, self.batches())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The Arrow PyCapsule interface: polars.DataFrame(results), pyarrow.table(results)."""
        return self.reader().__arrow_c_stream__(requested_schema)

    def pandas(self) -> Any:
        """All rows as a pandas DataFrame; UsageError where pandas is not installed.

        Columns of whole numbers are `Int64`, whatever they hold. Of one with a null (the seed of a line that
        could not be read) `table().to_pandas()` would make floats, in which seeds above 2**53 are others.
        """
        if find_spec("pandas") is None:
            raise UsageError("This needs pandas: pip install pandas, or take table().")
        import pandas
        import pyarrow as pa

        whole = pandas.Int64Dtype()
        return self.table().to_pandas(types_mapper=lambda kind: whole if pa.types.is_integer(kind) else None)

    def dicts(self) -> Iterator[dict[str, Any]]:
        """Rows as dicts of plain values without what is null, as `--format jsonl` has them."""
        from pagemill.jobs.results import as_document

        return map(as_document, self)

    def write_jsonl(self, output: BinaryIO) -> int:
        """Every row as one JSON object a line; returns how many."""
        from pagemill.jobs.results import to_jsonl

        return to_jsonl(self, output)

    def write_csv(self, output: BinaryIO, *, safe: bool = False) -> int:
        """Every row as a record of CSV, after a head; returns how many. Texts are in quotes, null is an empty
        cell without, seeds are exact, `choices` are JSON text.

        safe: for a spreadsheet, with an apostrophe before each text that it may take for a formula; without
        it, texts are what the model said."""
        from pagemill.jobs.results import to_csv

        return to_csv(self.batches(), output, safe=safe)

    def write_parquet(self, output: BinaryIO) -> int:
        """All rows as one Parquet file of the schema that the job's parts have; returns how many."""
        from pagemill.jobs.parquet import stream_batches

        return stream_batches(output, self.batches())

    def write(self, path: str | Path) -> int:
        """All rows as one file, in bounded memory: .csv, .parquet or .jsonl, by its name; returns how many.

        It appears whole or not at all, in the place of one that was there. Raises UsageError for another
        suffix, and where the file cannot be made.
        """
        place = Path(path)
        writers = {".csv": self.write_csv, ".jsonl": self.write_jsonl, ".parquet": self.write_parquet}
        if place.suffix not in writers:
            raise UsageError(f"{place} says no format: end it in .csv, .parquet or .jsonl.")
        with output_file(place) as file:
            return writers[place.suffix](file)

    def write_openai(self, output: BinaryIO, errors: BinaryIO) -> tuple[int, int]:
        """OpenAI's batch output and error files; returns the number of lines in each. Of an ended job they
        are the same bytes every time: a response's `created` is when its row had finished."""
        from pagemill.jobs.results import ended_at, to_openai

        rows = iter(self)  # a job that has not ended is refused before anything else is read of it
        return to_openai(rows, output, errors, created=ended_at(self.storage, self.job))


class AsyncResults:
    """`async for row in results`, or `await results.list()`, `.table()`, `.pandas()`: see `Results`.

    What takes Arrow streams (a record-batch reader, polars) is given `results.sync`, which blocks.
    """

    def __init__(self, sync: Results) -> None:
        self.sync = sync

    def __aiter__(self) -> AsyncIterator[ResultRow]:
        return threaded(self.sync.__iter__)

    async def list(self) -> list[ResultRow]:
        """All rows in memory."""
        return await asyncio.to_thread(self.sync.list)

    def batches(self) -> AsyncIterator[pa.RecordBatch]:
        """All rows as Arrow record batches."""
        return threaded(self.sync.batches, 1)

    async def table(self) -> pa.Table:
        """All rows as one Arrow table."""
        return await asyncio.to_thread(self.sync.table)

    async def pandas(self) -> Any:
        """All rows as a pandas DataFrame; see `Results.pandas`."""
        return await asyncio.to_thread(self.sync.pandas)

    def dicts(self) -> AsyncIterator[dict[str, Any]]:
        """Rows as dicts of plain values; see `Results.dicts`."""
        return threaded(self.sync.dicts)

    async def write(self, path: str | Path) -> int:
        """All rows as one CSV, Parquet or JSONL file; see `Results.write`."""
        return await asyncio.to_thread(self.sync.write, path)


async def threaded(start: Callable[[], Iterator[T]], hop: int = ROWS_A_HOP) -> AsyncIterator[T]:
    """A blocking iterator for an event loop: `hop` items are drawn in a thread at a time."""
    iterator = await asyncio.to_thread(start)
    try:
        while items := await asyncio.to_thread(lambda: list(islice(iterator, hop))):
            for item in items:
                yield item
    finally:
        # Left early: what it holds open is closed now, unless its thread is still drawing from it.
        with contextlib.suppress(ValueError):
            if isinstance(iterator, Generator):
                iterator.close()
