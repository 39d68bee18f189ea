"""Sealing and committing a shard: finished rows become immutable objects, then one part that counts.

    seal     some finished rows   →  _work/<shard>/…            a segment, named by fence, number and content
    commit   segments + the rest  →  parts/part-<shard>-…       merged, read back, checked
                                  →  commits/<shard>.json       put-if-absent: this is the commit

Two workers may do all of this for one shard at once; the commit record says whose part counts, and the
other one adopts it. Nothing here deletes anything. This room may not know Redis, leases or engines.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from pagemill.jobs import layout
from pagemill.jobs.errors import ObjectNotFound, PagemillError, StorageError
from pagemill.jobs.merge import Source, merge
from pagemill.jobs.parquet import (
    PartStats,
    ResultRow,
    batches_of,
    read_batches,
    stats_of,
    write_batches,
    write_rows,
)
from pagemill.jobs.scratch import scratch_folder
from pagemill.jobs.storage import CHUNK_BYTES, Storage, decide, read_json, scratch_faults

log = logging.getLogger(__name__)

DIGEST_CHARS: Final = 16
UPLOADS: Final = 3
"""How often a part is sent that comes back as something else, before the store is called broken."""


class PartDamaged(StorageError):
    """A part is missing, or is not what was written."""


class RowsDoNotMatch(PagemillError):
    """What should be committed is not exactly the rows of the shard; an error of ours or a lost segment.

    missing: row indexes to be computed again.  unexpected: row indexes that belong to no row of the shard.
    """

    def __init__(self, job: str, shard: int, missing: set[int], unexpected: set[int]) -> None:
        super().__init__(
            f"Shard {shard} of {job} cannot be committed: {len(missing)} of its rows are missing"
            f"{_some(missing)}, and {len(unexpected)} rows are not its own{_some(unexpected)}."
        )
        self.missing = missing
        self.unexpected = unexpected


@dataclass(frozen=True, slots=True)
class Sealed:
    """What the segments of a shard hold. lost: those that are gone or damaged; their rows must run again."""

    segments: list[dict[str, Any]] = field(default_factory=list)
    row_indexes: set[int] = field(default_factory=set)
    lost: list[dict[str, Any]] = field(default_factory=list)


def write_segment(
    storage: Storage, job: str, shard: int, fence: str, seq: int, rows: Iterable[ResultRow]
) -> dict[str, Any]:
    """Puts finished rows into the store; the part dict of the segment, with `fence` and `seq`."""
    with _scratch() as folder:
        path = folder / "segment.parquet"
        stats = write_rows(path, sorted(rows, key=_row_index))
        key = layout.segment(job, shard, fence, seq, stats.sha256[:DIGEST_CHARS])
        storage.put_file(key, path)
    return {**stats.part(key, shard), "fence": fence, "seq": seq}


def list_segments(storage: Storage, job: str, shard: int | None = None) -> list[dict[str, Any]]:
    """The segments that the store holds for a shard (or all), as `write_segment` returned them.

    For when Redis has forgotten them. Damaged ones are left out: the name of a segment holds its digest.
    """
    found = []
    for info in storage.list(layout.work(job, shard)):
        identity = layout.segment_identity(info.key)
        if identity is None:
            continue
        number, fence, seq, digest = identity
        try:
            with storage.as_file(info.key) as path:
                stats = stats_of(path, name=info.key)
        except StorageError as error:
            if error.transient:
                raise
            log.warning("left out a segment: %s", error)
            continue
        if stats.sha256.startswith(digest):
            found.append({**stats.part(info.key, number), "fence": fence, "seq": seq})
    return found


def read_sealed(storage: Storage, segments: Iterable[dict[str, Any]]) -> Sealed:
    """Which rows are sealed already; every segment is checked against its checksum."""
    sealed = Sealed()
    for segment in segments:
        with ExitStack() as stack:
            path = _fetched(stack, storage, segment)
            if path is None:
                sealed.lost.append(segment)
                continue
            sealed.segments.append(segment)
            for batch in read_batches(path, columns=["row_index"], name=segment["key"]):
                sealed.row_indexes.update(batch.column("row_index").to_pylist())
    return sealed


def commit_shard(
    storage: Storage,
    job: str,
    shard_entry: dict[str, Any],
    *,
    fence: str,
    segments: Iterable[dict[str, Any]],
    rows: Iterable[ResultRow],
    expected_row_indexes: set[int],
) -> dict[str, Any]:
    """Merges segments and rows into the part of this shard, and decides that it counts.

    rows: finished and not sealed; newer than any segment. Of a row that came more than once, the one with
    the highest fence counts, then the one sealed last. Returns the commit record that counts, which may be
    somebody else's: look at its part. Raises RowsDoNotMatch, and StorageError when the store refuses.
    """
    shard = int(shard_entry["shard"])
    found = read_commit(storage, job, shard)
    if found is not None:
        return found
    try:
        part = make_part(storage, job, shard, fence, segments, rows, expected_row_indexes)
    except (StorageError, RowsDoNotMatch):
        # Where somebody else committed meanwhile and the job ended, our segments or our part were swept.
        found = read_commit(storage, job, shard)
        if found is None:
            raise
        return found
    record = {"job": job, "shard": shard, "fence": fence, "part": part, "committed_at": time.time()}
    return decide(storage, layout.commit(job, shard), record)[0]


def read_commit(storage: Storage, job: str, shard: int) -> dict[str, Any] | None:
    return read_json(storage, layout.commit(job, shard))


def list_commits(storage: Storage, job: str) -> dict[int, dict[str, Any]]:
    """All commit records of a job, by shard."""
    keys = {layout.commit_shard(info.key): info.key for info in storage.list(layout.commits(job))}
    numbers = [number for number in keys if number is not None]
    with ThreadPoolExecutor(8, thread_name_prefix="pagemill-read") as pool:
        records = pool.map(lambda number: read_json(storage, keys[number]), numbers)
        return {number: record for number, record in zip(numbers, records, strict=True) if record is not None}


def check_part(storage: Storage, part: dict[str, Any]) -> None:
    """Reads a part back. Raises PartDamaged where it is not what the part dict says."""
    digest, size = hashlib.sha256(), 0
    try:
        with storage.open(part["key"]) as stream:
            while piece := stream.read(CHUNK_BYTES):
                digest.update(piece)
                size += len(piece)
    except ObjectNotFound:
        raise PartDamaged(f"The part {part['key']} is missing from {storage.url}.") from None
    if size != part["bytes"] or digest.hexdigest() != part["sha256"]:
        raise PartDamaged(
            f"The part {part['key']} in {storage.url} is damaged: it is not what was written there."
        )


def make_part(
    storage: Storage,
    job: str,
    shard: int,
    fence: str,
    segments: Iterable[dict[str, Any]],
    rows: Iterable[ResultRow],
    expected: set[int],
) -> dict[str, Any]:
    """Merges and puts a part, and reads it back; it counts for nothing until something names it."""
    with _scratch() as folder, ExitStack() as stack:
        path = folder / "part.parquet"
        runs = _runs(stack, storage, segments, rows, fence)
        stats = _merge_runs(path, runs, job, shard, expected)
        part = stats.part(layout.part(job, shard, fence, stats.sha256[:DIGEST_CHARS]), shard)
        _publish(storage, part, path)
    return part


def _publish(storage: Storage, part: dict[str, Any], path: Path) -> None:
    for left in reversed(range(UPLOADS)):
        storage.put_file(part["key"], path)
        try:
            check_part(storage, part)
        except StorageError as error:
            if not left or error.transient:
                raise
            log.warning("sending a part again: %s", error)
        else:
            return


@dataclass(frozen=True, slots=True)
class _Run:
    """Sorted rows that compete for a place in the part; the highest rank wins a row.

    read: all of them, or only some columns.
    """

    rank: tuple[tuple[int, ...], int]
    read: Callable[[list[str] | None], Iterator[pa.RecordBatch]]


def _runs(
    stack: ExitStack,
    storage: Storage,
    segments: Iterable[dict[str, Any]],
    unsealed: Iterable[ResultRow],
    fence: str,
) -> list[_Run]:
    segments = list(segments)
    newest = max((int(segment["seq"]) for segment in segments), default=0) + 1
    # Fewer than make a segment, or rows without text: they stay in memory.
    batches = list(batches_of(sorted(unsealed, key=_row_index)))
    runs = [_Run((layout.fence_order(fence), newest), lambda columns: _selected(batches, columns))]
    for segment in segments:
        path = _fetched(stack, storage, segment)
        if path is not None:
            rank = layout.fence_order(segment["fence"]), int(segment["seq"])
            runs.append(_Run(rank, partial(_read_columns, path, segment["key"])))
    return sorted(runs, key=lambda run: run.rank)


def _selected(batches: Iterable[pa.RecordBatch], columns: list[str] | None) -> Iterator[pa.RecordBatch]:
    return (batch if columns is None else batch.select(columns) for batch in batches)


def _read_columns(path: Path, name: str, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
    return read_batches(path, columns=columns, name=name)


def _merge_runs(path: Path, runs: list[_Run], job: str, shard: int, expected: set[int]) -> PartStats:
    winner: dict[int, int] = {}
    bounds: list[tuple[int, int]] = []
    entered = 0
    for number, run in enumerate(runs):
        first = last = -1
        for batch in run.read(["row_index"]):
            indexes = batch.column("row_index").to_pylist()
            winner.update(dict.fromkeys(indexes, number))  # runs ascend by rank: the last one stays
            first = indexes[0] if first < 0 else first
            last = indexes[-1]
            entered += len(indexes)
        bounds.append((first, last))
    if winner.keys() != expected:
        raise RowsDoNotMatch(job, shard, expected - winner.keys(), winner.keys() - expected)
    sources = [
        Source(*bound, _won(run, number, winner if entered > len(winner) else None))
        for number, (run, bound) in enumerate(zip(runs, bounds, strict=True))
    ]
    return write_batches(path, merge(sources))


def _won(run: _Run, number: int, winner: dict[int, int] | None) -> Any:
    """Opens a run as only those of its rows that count; winner is None where no row came twice."""

    @contextmanager
    def opened() -> Iterator[Iterator[pa.RecordBatch]]:
        batches = run.read(None)
        if winner is not None:
            batches = (
                batch.filter(pa.array([winner[i] == number for i in batch.column("row_index").to_pylist()]))
                for batch in batches
            )
        yield batches

    return opened


def _fetched(stack: ExitStack, storage: Storage, segment: dict[str, Any]) -> Path | None:
    """The segment as a local file, None where it is gone or not what was sealed."""
    try:
        path = stack.enter_context(storage.as_file(segment["key"]))
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except (ObjectNotFound, FileNotFoundError):
        log.warning("a sealed segment is gone: %s", segment["key"])
        return None
    if digest != segment["sha256"]:
        log.warning("a sealed segment is damaged: %s", segment["key"])
        return None
    return path


@contextmanager
def _scratch() -> Iterator[Path]:
    with ExitStack() as stack:
        with scratch_faults("make a temporary folder"):
            folder = stack.enter_context(scratch_folder())
        yield folder


def _row_index(row: ResultRow) -> int:
    return row.row_index


def _some(indexes: set[int]) -> str:
    if not indexes:
        return ""
    shown = ", ".join(map(str, sorted(indexes)[:5]))
    return f" ({shown}{', …' if len(indexes) > 5 else ''})"
