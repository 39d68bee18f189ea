"""Results as Parquet: files of one explicit schema (result.py), whole or not there.

A file is written under a temporary name, closed, read back, and only then given its name, because an
exception inside a writer leaves a truncated file that looks valid. This room may not know where the rows
come from nor where the file goes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pagemill.jobs.errors import StorageError
from pagemill.jobs.result import OLDER, SCHEMA, SCHEMA_VERSION, ResultRow, to_json
from pagemill.jobs.storage import scratch_faults

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "PartStats",
    "ResultRow",
    "batch_of",
    "batches_of",
    "read_batches",
    "read_rows",
    "rows_of",
    "stats_of",
    "stream_batches",
    "to_json",
    "write_batches",
    "write_rows",
]

ROWS_PER_GROUP: Final = 8192
BYTES_PER_GROUP: Final = 16 << 20
"""A row group ends at either bound: tiny ones bloat the footer, and large ones the reader's memory."""
BATCH_ROWS: Final = 1024
BATCH_BYTES: Final = 1 << 20
"""How much is held as Python rows, or read at once, at a time."""
# Few distinct values: a dictionary pays. Texts differ, and a dictionary of them only costs memory.
_DICTIONARY = ["status", "kind", "finish_reason", "error_code", "model", "requested_model"]
_STATISTICS = ["row_index", "status", "error_code"]
_VALUES = attrgetter(*SCHEMA.names)


@dataclass(frozen=True, slots=True)
class PartStats:
    """What a manifest says of a file of rows. errors: how many rows failed with each code.

    The row indexes of a file without rows are -1.
    """

    rows: int
    completed: int
    failed: int
    bytes: int
    sha256: str
    min_row_index: int
    max_row_index: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    errors: dict[str, int] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def part(self, key: str, shard: int) -> dict[str, Any]:
        """The "part dict" of plans, commit records and manifests."""
        return {"key": key, "shard": shard, **{name: getattr(self, name) for name in self.__slots__}}


def write_rows(path: Path, rows: Iterable[ResultRow]) -> PartStats:
    """Writes rows, which must ascend by row_index, to a local file; an error leaves no file.

    Raises ValueError for rows out of order, and StorageError (DiskFull) where the disk refuses.
    """
    return write_batches(path, batches_of(rows))


def write_batches(path: Path, batches: Iterable[pa.RecordBatch]) -> PartStats:
    """The same from record batches of SCHEMA."""
    temporary = path.with_name(path.name + ".writing")
    try:
        with scratch_faults(f"write {path.name}"):
            with pa.OSFile(str(temporary), "wb") as file, _PartWriter(file) as writer:
                for batch in batches:
                    writer.add(batch)
            stats = writer.checked(temporary)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return stats


def stream_batches(output: BinaryIO, batches: Iterable[pa.RecordBatch]) -> int:
    """The same into a file that is open and stays so; returns how many rows.

    Whoever opened it sees to it that nobody finds it before it is whole.
    """
    with _PartWriter(output) as writer:
        for batch in batches:
            writer.add(batch)
    return writer.rows


def read_batches(
    source: Path | bytes, *, columns: list[str] | None = None, name: str = ""
) -> Iterator[pa.RecordBatch]:
    """The rows in the order of the file, about BATCH_BYTES at a time.

    name: what to call the file in errors. Raises StorageError where it is damaged or no file of ours.
    """
    name = name or (source.name if isinstance(source, Path) else "a result file")
    with _readable(name):
        opened = pa.BufferReader(source) if isinstance(source, bytes) else str(source)
        file = pq.ParquetFile(opened, page_checksum_verification=True, buffer_size=1 << 16, pre_buffer=False)
    with file:
        with _readable(name):
            older = not file.schema_arrow.equals(SCHEMA)
            if older and not any(file.schema_arrow.equals(schema) for schema in OLDER):
                raise StorageError(f"{name} has other columns than this version of Pagemill writes.")
            rows = _rows_at_once(file.metadata)
            wanted = SCHEMA.names if columns is None else columns
            known = [column for column in wanted if column in file.schema_arrow.names]
            batches = file.iter_batches(rows, columns=known, use_threads=False)
        while True:
            with _readable(name):
                batch = next(batches, None)
            if batch is None:
                return
            yield _filled(batch, wanted) if older else batch


def _filled(batch: pa.RecordBatch, wanted: list[str]) -> pa.RecordBatch:
    """The batch with the columns that its file is too old to have, as nulls."""
    schema = pa.schema([SCHEMA.field(name) for name in wanted], SCHEMA.metadata)
    columns = [
        batch.column(field.name) if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def read_rows(source: Path | bytes, *, name: str = "") -> Iterator[ResultRow]:
    """The rows in the order of the file. Raises StorageError as `read_batches` does."""
    for batch in read_batches(source, name=name):
        yield from rows_of(batch)


def rows_of(batch: pa.RecordBatch) -> Iterator[ResultRow]:
    for doc in batch.to_pylist():
        if doc["choices"] is not None:
            doc["choices"] = [{k: v for k, v in c.items() if v is not None} for c in doc["choices"]]
        yield ResultRow(**doc)


def stats_of(path: Path, *, name: str = "") -> PartStats:
    """What `write_rows` said of this file when it wrote it."""
    count = _Count()
    columns = ["row_index", "status", "prompt_tokens", "completion_tokens", "cached_tokens", "error_code"]
    for batch in read_batches(path, columns=columns, name=name):
        count.add(batch)
    return count.stats(path)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"{name} is damaged: it cannot be read as Parquet.") from error


def _rows_at_once(metadata: pq.FileMetaData) -> int:
    """So many rows of this file as make about BATCH_BYTES: long texts must not fill the memory."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    widest = max((g.total_byte_size / max(1, g.num_rows) for g in groups), default=1.0)
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(1.0, widest))))


class _PartWriter:
    """Gathers batches into row groups that end at ROWS_PER_GROUP or BYTES_PER_GROUP, whichever is first.

    file: stays open.
    """

    def __init__(self, file: pa.NativeFile | BinaryIO) -> None:
        self._writer = pq.ParquetWriter(
            file,
            SCHEMA,
            compression="zstd",
            use_dictionary=_DICTIONARY,
            write_statistics=_STATISTICS,
            write_page_checksum=True,
            sorting_columns=[pq.SortingColumn(0)],
        )
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._pending_bytes = 0
        self._groups = 0
        self._count = _Count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
            self._writer.close()
            return
        with suppress(pa.ArrowException, OSError):
            self._writer.close()  # or its destructor would, at a time of its own choosing

    def add(self, batch: pa.RecordBatch) -> None:
        self._count.add(batch)
        while batch.num_rows:
            room = BYTES_PER_GROUP - self._pending_bytes
            fits = max(1, int(batch.num_rows * room / max(1, batch.nbytes)))
            taken = batch.slice(0, min(fits, ROWS_PER_GROUP - self._pending_rows))
            self._pending.append(taken)
            self._pending_rows += taken.num_rows
            self._pending_bytes += taken.nbytes
            if self._pending_rows >= ROWS_PER_GROUP or self._pending_bytes >= BYTES_PER_GROUP:
                self._flush()
            batch = batch.slice(taken.num_rows)

    def _flush(self) -> None:
        if self._pending:
            self._writer.write_table(pa.Table.from_batches(self._pending, SCHEMA), self._pending_rows)
            self._groups += 1
        self._pending = []
        self._pending_rows = self._pending_bytes = 0

    @property
    def rows(self) -> int:
        return self._count.rows

    def checked(self, path: Path) -> PartStats:
        """The closed file, read back: a quiet failure is found before anybody relies on it."""
        stats = self._count.stats(path)
        with _readable(path.name):
            metadata = pq.read_metadata(path)
        if (metadata.num_rows, metadata.num_row_groups) != (stats.rows, self._groups):
            raise StorageError(f"{path.name} was written, but does not hold what was written.")
        return stats


class _Count:
    """Sums over batches, and proof that their rows ascend."""

    def __init__(self) -> None:
        self.rows = 0
        self._failed = 0
        self._first = -1
        self._last = -1
        self._tokens = Counter[str]()
        self._errors = Counter[str]()

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        indexes = batch.column("row_index")
        first, last = indexes[0].as_py(), indexes[-1].as_py()
        steps = pc.greater(indexes.slice(1), indexes.slice(0, len(indexes) - 1))
        if first <= self._last or not pc.all(steps, min_count=0).as_py():
            raise ValueError("result rows must ascend by row_index, each once")
        self._first = first if self.rows == 0 else self._first
        self._last = last
        self.rows += batch.num_rows
        self._failed += pc.sum(pc.equal(batch.column("status"), "failed")).as_py()
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            self._tokens[name] += pc.sum(batch.column(name)).as_py()
        for found in pc.value_counts(batch.column("error_code").drop_null()).to_pylist():
            self._errors[found["values"]] += found["counts"]

    def stats(self, path: Path) -> PartStats:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256")
        return PartStats(
            rows=self.rows,
            completed=self.rows - self._failed,
            failed=self._failed,
            bytes=path.stat().st_size,
            sha256=digest.hexdigest(),
            min_row_index=self._first,
            max_row_index=self._last,
            prompt_tokens=self._tokens["prompt_tokens"],
            completion_tokens=self._tokens["completion_tokens"],
            cached_tokens=self._tokens["cached_tokens"],
            errors=dict(sorted(self._errors.items())),
        )


def batches_of(rows: Iterable[ResultRow]) -> Iterator[pa.RecordBatch]:
    """Rows as batches of SCHEMA, of bounded size."""
    held: list[ResultRow] = []
    held_bytes = 0
    for row in rows:
        held.append(row)
        held_bytes += _weight(row)
        if len(held) >= BATCH_ROWS or held_bytes >= BATCH_BYTES:
            yield batch_of(held)
            held, held_bytes = [], 0
    if held:
        yield batch_of(held)


def _weight(row: ResultRow) -> int:
    """Characters of what can be long. Asked of every row, so without generators."""
    size = len(row.text or "") + len(row.logprobs or "")
    size += len(row.error_message or "") + len(row.metadata or "")
    if row.choices is not None:
        size += sum(len(str(value)) for choice in row.choices for value in choice.values())
    return size


def batch_of(rows: list[ResultRow]) -> pa.RecordBatch:
    """Rows as one batch of SCHEMA."""
    values = zip(*map(_VALUES, rows), strict=True)
    columns = [_column(column, f.type) for column, f in zip(values, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        # Half a surrogate pair has no UTF-8; one such text must not cost the other rows their results.
        return pa.array([_encodable(value) for value in values], kind)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {name: _encodable(item) for name, item in value.items()}
    return value
