"""Tables as rows: Parquet files, and whatever exports Arrow data (pyarrow, pandas, polars, DuckDB, …).

Read in batches of bounded size; a frame is taken through the Arrow PyCapsule interface
(https://arrow.apache.org/docs/format/CDataInterface/PyCapsuleInterface.html), so that none of these libraries
is needed here. This room knows Arrow, and may not know what becomes of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from pagemill.jobs.columns import Columns
from pagemill.jobs.errors import UsageError

# Arrow takes a quarter of a second to load, which other inputs need not pay: imported where tables are read.

ROWS: Final = 256
"""Rows that are Python objects at a time; one may be large."""
BATCH_BYTES: Final = 1 << 30
"""What the rows of a batch may come to where a file of a thousand bytes can say anything about them."""


def is_table(value: Any) -> bool:
    """Whether it exports Arrow data, or is a frame that is too old to."""
    exports = hasattr(value, "__arrow_c_stream__") or hasattr(value, "__arrow_c_array__")
    return exports or (hasattr(value, "columns") and hasattr(value, "dtypes"))


def rows_of_table(table: Any, columns: Columns) -> Iterator[Any]:
    """Lines of a frame, as objects, or the values of one column. Its columns are checked before the first."""
    import pyarrow as pa

    exported = _exported(table)
    if isinstance(exported, pa.RecordBatchReader):
        needed, line = columns.needed(exported.schema.names), columns.liner()
        return map(line, _cells(exported, needed, "The table"))
    if columns.named:
        raise UsageError("This is one column, not a table; leave prompt_column, template and id_column out.")
    return (item for batch in _slices(exported.chunks) for item in batch.to_pylist())


def rows_of_parquet(
    opened: AbstractContextManager[Path | BinaryIO], name: str, columns: Columns
) -> Iterator[dict[str, Any]]:
    """Lines of a Parquet file, as objects. Raises UsageError where it is none, or lacks a column."""
    with opened as place, _readable(name), _parquet(place) as file:
        needed, line = columns.needed(file.schema_arrow.names), columns.liner()
        batches = file.iter_batches(rows_at_once(file.metadata, needed), columns=needed)
        yield from map(line, _cells(batches, needed, name))


def rows_at_once(footer: Any, needed: list[str]) -> int:
    """How many rows of a Parquet file make a batch. A dictionary holds a cell once, and each row that names
    it is the whole cell again: no more rows than would fit if each were as large as all of the dictionary."""
    largest = 1
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            path = chunk.path_in_schema
            if chunk.has_dictionary_page and any(path == n or path.startswith(f"{n}.") for n in needed):
                largest = max(largest, chunk.total_uncompressed_size)
    return max(1, min(ROWS, BATCH_BYTES // largest))


def _parquet(place: Path | BinaryIO) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(place, pre_buffer=False, page_checksum_verification=True)


def _exported(table: Any) -> Any:
    """A RecordBatchReader, or a ChunkedArray where it is one column."""
    import pyarrow as pa

    name = type(table).__name__
    try:
        if not hasattr(table, "__arrow_c_stream__"):
            array = pa.array(table)
            if not pa.types.is_struct(array.type):
                return pa.chunked_array([array])
            batch = pa.RecordBatch.from_struct_array(array)
            return pa.RecordBatchReader.from_batches(batch.schema, [batch])
        if isinstance(table, pa.ChunkedArray):
            return table
        try:
            return pa.RecordBatchReader.from_stream(table)
        except pa.ArrowInvalid:  # a stream of something else than structs
            return pa.chunked_array(table)
    except (pa.ArrowException, ImportError, TypeError) as error:
        raise UsageError(f"This {name} cannot be read as Arrow data: {_said(error)}") from error


def _cells(batches: Iterable[Any], needed: list[str], name: str) -> Iterator[dict[str, Any]]:
    """Cells of these columns, by name. A column is one name, whatever dots it has."""
    with _readable(name):
        for batch in _slices(batches):
            found = [batch.column(column).to_pylist() for column in needed]
            for cells in zip(*found, strict=True):
                yield dict(zip(needed, cells, strict=True))


def _slices(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        for start in range(0, len(batch), ROWS):
            yield batch.slice(start, ROWS)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OverflowError) as error:
        raise UsageError(f"{name} cannot be read: {_said(error)}") from error
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or _said(error)}") from error


def _said(error: BaseException) -> str:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{first[:200].rstrip('.')}."
