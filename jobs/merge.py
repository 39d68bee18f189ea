"""Many sorted runs of result rows as one, in memory that does not grow with how many there are.

Each source ascends by row_index. A source is opened when the merge gets to its first row and closed after
its last, so that runs which follow one another are read one at a time. Where more than FAN_IN of them
overlap (a plan that orders rows by prefix makes every part span the whole file), groups are first merged
into longer runs on the local disk. This room may not know where sources come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from pagemill.jobs.errors import StorageError
from pagemill.jobs.parquet import BATCH_BYTES, BATCH_ROWS, SCHEMA
from pagemill.jobs.scratch import scratch_folder
from pagemill.jobs.storage import scratch_faults

FAN_IN: Final = 32
"""Runs read at once: about a megabyte of rows, and as much again inside the Parquet reader, for each."""


@dataclass(frozen=True, slots=True)
class Source:
    """A run to be opened. first, last: no row of it lies outside these row indexes."""

    first: int
    last: int
    open: Callable[[], AbstractContextManager[Iterator[pa.RecordBatch]]]


def merge(sources: Iterable[Source], *, fan_in: int = FAN_IN) -> Iterator[pa.RecordBatch]:
    """All rows of all sources, ascending by row_index, in batches of at most BATCH_ROWS.

    Raises StorageError where two sources hold the same row_index, and what the sources raise.
    """
    runs = sorted(sources, key=lambda source: (source.first, source.last))
    if _overlap(runs) <= fan_in:
        yield from _merged(runs)
        return
    with ExitStack() as stack:
        with scratch_faults("make a temporary folder"):
            folder = stack.enter_context(scratch_folder())
        level = 0
        while _overlap(runs) > fan_in:
            level += 1
            groups = [runs[i : i + fan_in] for i in range(0, len(runs), fan_in)]
            runs = [_spilled(group, folder / f"{level}-{i}") for i, group in enumerate(groups)]
        yield from _merged(runs)


def _overlap(runs: Sequence[Source]) -> int:
    """The most runs that any one row index lies inside of."""
    events = sorted(event for run in runs for event in ((run.first, 1), (run.last + 1, -1)))
    depth = most = 0
    for _, step in events:
        depth += step
        most = max(most, depth)
    return most


def _merged(runs: Sequence[Source]) -> Iterator[pa.RecordBatch]:
    """
    run 0   ├─ batch ──┤├─ …              Of all batches at hand, the one that ends first sets the
    run 1      ├─ batch ────┤├─ …         frontier. No row at or before it can still be unread, so
    run 2                     ├─ …        what lies there is sorted and given out.
                       ↑ frontier
    """
    waiting = list(reversed(runs))
    cursors: list[_Cursor] = []
    try:
        while waiting or cursors:
            while waiting and (not cursors or waiting[-1].first <= min(c.last for c in cursors)):
                cursor = _Cursor(waiting.pop())
                cursors += [cursor] if cursor.more else []
            if not cursors:
                continue
            frontier = min(c.last for c in cursors)
            pieces = [c.take(frontier) for c in cursors if c.first <= frontier]
            cursors = [c for c in cursors if c.more]
            yield from _sorted(pieces)
    finally:
        for cursor in cursors:
            cursor.close()


def _sorted(pieces: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    table = pa.Table.from_batches(pieces, SCHEMA)
    if len(pieces) > 1:
        table = table.take(pc.sort_indices(table.column("row_index")))
        indexes = table.column("row_index").combine_chunks()
        if pc.any(pc.equal(indexes.slice(1), indexes.slice(0, len(indexes) - 1)), min_count=0).as_py():
            raise StorageError("Two parts hold the same row: the job's objects were changed from outside.")
    yield from table.combine_chunks().to_batches(max_chunksize=BATCH_ROWS)


class _Cursor:
    """A place in an open source. `more` is false, and the source closed, after its last row."""

    def __init__(self, source: Source) -> None:
        self._context = source.open()
        self._batches = self._context.__enter__()
        self._load()

    def _load(self) -> None:
        self.more = False
        try:
            for batch in self._batches:
                if batch.num_rows:
                    self._set(batch)
                    self.more = True
                    return
        finally:
            if not self.more:
                self.close()

    def _set(self, batch: pa.RecordBatch) -> None:
        self._batch = batch
        indexes = batch.column("row_index")
        self.first: int = indexes[0].as_py()
        self.last: int = indexes[-1].as_py()

    def take(self, frontier: int) -> pa.RecordBatch:
        """The rows up to the frontier, of which there is at least one."""
        batch = self._batch
        count = pc.sum(pc.less_equal(batch.column("row_index"), frontier)).as_py()
        if count == batch.num_rows:
            self._load()
        else:
            self._set(batch.slice(count))
        return batch.slice(0, count)

    def close(self) -> None:
        self._context.__exit__(None, None, None)


def _spilled(group: Sequence[Source], path: Path) -> Source:
    """The group merged into one run on disk, where reading it again costs no Parquet decoding."""
    if len(group) == 1:
        return group[0]
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with scratch_faults(f"write {path.name}"), pa.OSFile(str(path), "wb") as file:  # noqa: SIM117
        with pa.ipc.new_stream(file, SCHEMA, options=options) as writer:
            for batch in _gathered(_merged(group)):
                writer.write_batch(batch)

    @contextmanager
    def opened() -> Iterator[Iterator[pa.RecordBatch]]:
        with pa.OSFile(str(path), "rb") as file, pa.ipc.open_stream(file) as reader:
            yield iter(reader)
        path.unlink(missing_ok=True)

    return Source(min(s.first for s in group), max(s.last for s in group), opened)


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches: each one costs a compressor for every column."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= BATCH_ROWS or size >= BATCH_BYTES:
            yield from pa.Table.from_batches(held).combine_chunks().to_batches()
            held, rows, size = [], 0, 0
    if held:
        yield from pa.Table.from_batches(held).combine_chunks().to_batches()
