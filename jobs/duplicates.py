"""Ids given twice, among more ids than a set could hold.

This room knows ids and row numbers. It may not know rows. An id is kept as 128 bits of blake2b (two
different ids that agree cannot be made, on purpose or otherwise), sorted in files; what is asked row by
row afterwards is a bit in memory, and for the few rows where it is set a search in a sorted file.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Final

from pagemill.jobs.errors import RowFault
from pagemill.jobs.parameters import shown
from pagemill.jobs.row import filled_id
from pagemill.jobs.sorting import Sorter

_DIGEST: Final = 16
_PLACE: Final = struct.Struct(">QQ")  # row index and line; big-endian, so that bytes sort like numbers
_NUMBER: Final = struct.Struct("<Q")
_FILLED: Final = re.compile(r"row-(0|[1-9][0-9]{0,17})")
_MEMORY: Final = 32 << 20


class Identities:
    """Told of every row's own id while rows are read; asked about each row afterwards."""

    def __init__(self, folder: Path, *, memory: int = _MEMORY) -> None:
        self._folder = folder
        self._memory = memory
        self._ids = Sorter(folder, "ids", memory=memory)
        self._claims = (folder / "claims").open("xb+")
        self._duplicate = _Bits()
        self._claimed = _Bits()
        self._first_lines: SortedFile | None = None
        self._given: SortedFile | None = None
        self.duplicates = 0

    def add(self, row_index: int, line: int, custom_id: str) -> None:
        """An id that a line brought. Called in the order of rows; bad lines count as well."""
        self._ids.add(_digest(custom_id) + _PLACE.pack(row_index, line))
        claim = _FILLED.fullmatch(custom_id)
        if claim is not None:
            self._claims.write(_NUMBER.pack(int(claim[1])))

    def settle(self, rows: int) -> None:
        """All `rows` rows have been read: find out which ids are taken."""
        any_claimed = self._settle_claims(rows)
        repeated = Sorter(self._folder, "repeated", memory=self._memory)
        given = _Writer(self._folder / "given") if any_claimed else None
        first = b""
        for record in self._ids.sorted():
            if record[:_DIGEST] != first[:_DIGEST]:
                first = record
                if given is not None:
                    given.write(record[:_DIGEST])
                continue
            row_index = _PLACE.unpack_from(record, _DIGEST)[0]
            self._duplicate.set(row_index)
            repeated.add(record[_DIGEST : _DIGEST + 8] + first[_DIGEST + 8 :])
        self.duplicates = repeated.count
        self._first_lines = _sorted_file(self._folder / "first-lines", 8, repeated.sorted())
        if given is not None:
            self._given = given.close(_DIGEST)

    def first_line(self, row_index: int) -> int | None:
        """The line that had this row's id before, where one had."""
        if self._first_lines is None or not self._duplicate.get(row_index):
            return None
        found = self._first_lines.find(row_index.to_bytes(8, "big"))
        return None if found is None else int.from_bytes(found[8:], "big")

    def first_duplicate(self) -> tuple[int, int] | None:
        """(row index, line of the first use) of the first row whose id was taken."""
        record = self._first_lines.first() if self._first_lines is not None else None
        return None if record is None else _PLACE.unpack(record)

    def is_claimed(self, row_index: int) -> bool:
        """Whether some line brought the id that would be filled in for this row."""
        return self._claimed.get(row_index)

    def fill(self, row_index: int) -> str:
        """The id of a row that brought none: one that no line of this job brought."""
        plain = filled_id(row_index)
        if not self.is_claimed(row_index):
            return plain
        # Rows do not compete among themselves: the row's own number is part of the name.
        return next(name for n in count(2) if not self._is_given(name := f"{plain}-{n}"))

    def close(self) -> None:
        self._claims.close()
        for file in (self._first_lines, self._given):
            if file is not None:
                file.close()

    def _settle_claims(self, rows: int) -> bool:
        """Which filled ids somebody took for himself; only now is it known which numbers are rows."""
        self._claims.seek(0)
        found = False
        while chunk := self._claims.read(_NUMBER.size * 8192):
            for (number,) in _NUMBER.iter_unpack(chunk):
                if number < rows:
                    self._claimed.set(number)
                    found = True
        return found

    def _is_given(self, custom_id: str) -> bool:
        return self._given is not None and self._given.find(_digest(custom_id)) is not None


def repeated_id(line: int | None, custom_id: str, first_line: int) -> RowFault:
    """What becomes of a row whose id a line before it had."""
    message = (
        f"line {line}: `custom_id` {shown(custom_id)} was given before, on line {first_line}: "
        "give each line one of its own"
    )
    return RowFault("duplicate_custom_id", message, line, custom_id)


def _digest(custom_id: str) -> bytes:
    return blake2b(custom_id.encode(), digest_size=_DIGEST).digest()


class _Bits:
    """A set of numbers as bits: ten million rows take 1.25 MB, however many of them are in it."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def set(self, number: int) -> None:
        at = number >> 3
        if at >= len(self._bytes):
            self._bytes.extend(bytes(max(at + 1 - len(self._bytes), len(self._bytes), 64)))
        self._bytes[at] |= 1 << (number & 7)

    def get(self, number: int) -> bool:
        at = number >> 3
        return at < len(self._bytes) and bool(self._bytes[at] >> (number & 7) & 1)


class SortedFile:
    """Records of one width, sorted, searched by their first bytes without reading them all."""

    def __init__(self, path: Path, width: int) -> None:
        self._width = width
        with path.open("rb") as file:
            size = file.seek(0, 2)
            self._count = size // width
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else None

    def find(self, key: bytes) -> bytes | None:
        low, high = 0, self._count
        while low < high:
            middle = (low + high) // 2
            record = self._record(middle)
            if record.startswith(key):
                return record
            if record < key:
                low = middle + 1
            else:
                high = middle
        return None

    def first(self) -> bytes | None:
        return self._record(0) if self._count else None

    def close(self) -> None:
        if self._map is not None:
            self._map.close()

    def _record(self, index: int) -> bytes:
        assert self._map is not None
        return self._map[index * self._width : (index + 1) * self._width]


class _Writer:
    """A file of records, closed into a SortedFile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb")

    def write(self, record: bytes) -> None:
        self._file.write(record)

    def close(self, width: int) -> SortedFile:
        self._file.close()
        return SortedFile(self._path, width)


def _sorted_file(path: Path, extra: int, records: Iterator[bytes]) -> SortedFile:
    writer = _Writer(path)
    for record in records:
        writer.write(record)
    return writer.close(8 + extra)
