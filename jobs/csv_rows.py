"""CSV (RFC 4180) as lines: a header, then records, whose cells are all text.

Python's own reader, told to be strict: a record that is no CSV is that record's error row, not a guess.
Nothing is held but one record. This room may not know what becomes of the lines.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any, Final

from pagemill.jobs.columns import Columns
from pagemill.jobs.errors import PlanRefused, UsageError
from pagemill.jobs.lines import ByteStream, sound_chunks
from pagemill.jobs.request import UNREADABLE

MAX_CELL: Final = 16 * 1024 * 1024
"""Characters. A quote that is never closed makes one cell of the rest of the file."""
DELIMITERS: Final = {".csv": ",", ".tsv": "\t"}


def rows_of_csv(
    stream: ByteStream, name: str, columns: Columns, *, delimiter: str = ",", suffix: str = ""
) -> Iterator[dict[str, Any]]:
    """Lines of a CSV file, as objects; records without any cell are skipped, as blank lines are.

    suffix: ".gz", ".zst" or "", how the bytes are packed. Bytes that are no UTF-8 are their row's fault.
    Raises UsageError for a file that has no header, whose columns are not what is asked for, or that is
    damaged.
    """
    csv.field_size_limit(max(csv.field_size_limit(), MAX_CELL))
    try:
        reader = csv.reader(_physical(sound_chunks(stream, suffix), name), delimiter=delimiter, strict=True)
        header = next((cells for cells in reader if cells), None)
        if header is None:
            raise UsageError(f"{name} is empty; its first line must name the columns.")
        needed, line = columns.needed(header), columns.liner(texts=True)
        places = [(column, header.index(column)) for column in needed]
        for cells in _records(reader, name):
            if isinstance(cells, str):
                yield {UNREADABLE: cells}
            elif len(cells) != len(header):
                yield {UNREADABLE: _ragged(len(cells), len(header))}
            else:
                yield line({column: cells[place] for column, place in places})
    except PlanRefused as refused:
        raise UsageError(f"{name} cannot be read: {refused}") from None
    except csv.Error as error:  # in the header
        raise UsageError(f"{name} is no CSV file: {error}.") from None


def _ragged(cells: int, columns: int) -> str:
    found = "1 cell" if cells == 1 else f"{cells} cells"
    return f"the record has {found}, and the header {columns}: quote cells that hold separators"


def _records(reader: Any, name: str) -> Iterator[list[str] | str]:
    """Records, or what is wrong with one."""
    while True:
        begun = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "larger than field limit" in str(error):
                raise UsageError(
                    f"{name}, line {begun}: a cell is longer than {MAX_CELL:,} characters; is a quote open?"
                ) from None
            yield f"the record on line {begun} of {name} is no CSV ({error}): quote its cells"
            continue
        if cells:
            yield cells


def _physical(chunks: Iterable[bytes], name: str) -> Iterator[str]:
    """Lines with their ends, at most MAX_CELL long."""
    text = io.TextIOWrapper(
        io.BufferedReader(_Joined(iter(chunks))), encoding="utf-8", errors="surrogateescape", newline=""
    )
    number = 0
    while line := text.readline(MAX_CELL):
        number += 1
        if len(line) == MAX_CELL:
            raise UsageError(f"{name}, line {number}: longer than {MAX_CELL:,} characters; is it CSV?")
        yield line


class _Joined(io.RawIOBase):
    """Chunks as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        taken = self._rest[: len(buffer)]
        buffer[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)
