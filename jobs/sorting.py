"""Sorting more records than memory holds: sorted runs in files, then a merge.

This room knows byte strings and their order. It may not know what they stand for: callers put the sort
key first and whatever they want back behind it.
"""

from __future__ import annotations

import io
import struct
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, cast

import zstandard

from pagemill.jobs.errors import StorageError

MEMORY: Final = 64 << 20
# Each open run holds a block and a decompressor's window while it is merged.
FAN_IN: Final = 32
BLOCK: Final = 256 << 10
_OVERHEAD: Final = 41  # of a bytes object and the pointer to it
_LENGTH: Final = struct.Struct("<I")


class Sorter:
    """Add records in any order, then take them sorted, once.

    Holds about `memory` bytes, whatever is added; the rest is in files `<name>.<n>` of the folder, which
    must exist. Files are compressed: rows that share a long prefix take little room once sorted.
    Not for several threads.
    """

    def __init__(self, folder: Path, name: str, *, memory: int = MEMORY, fan_in: int = FAN_IN) -> None:
        self._folder = folder
        self._name = name
        self._memory = memory
        self._fan_in = fan_in
        self._records: list[bytes] = []
        self._held = 0
        self._runs: list[Path] = []
        self._made = 0
        self.count = 0

    def add(self, record: bytes) -> None:
        self._records.append(record)
        self.count += 1
        self._held += len(record) + _OVERHEAD
        if self._held >= self._memory:
            self._spill()

    def sorted(self) -> Iterator[bytes]:
        """All records in the order of their bytes. Their files go as they are read."""
        if not self._runs:
            self._records.sort()
            records, self._records = self._records, []
            return iter(records)
        self._spill()
        while len(self._runs) > self._fan_in:
            first, self._runs = self._runs[: self._fan_in], self._runs[self._fan_in :]
            self._write(_merged([_blocks(path) for path in first]))
        return _merged([_blocks(path) for path in self._runs])

    def _spill(self) -> None:
        self._records.sort()
        self._write(iter(self._records))
        self._records.clear()
        self._held = 0

    def _write(self, records: Iterator[bytes]) -> None:
        path = self._folder / f"{self._name}.{self._made}"
        self._made += 1
        compressor = zstandard.ZstdCompressor(level=1)
        with path.open("xb") as raw, compressor.stream_writer(raw) as out:
            for block in _framed(records):
                out.write(block)
        self._runs.append(path)


def _framed(records: Iterator[bytes]) -> Iterator[bytes]:
    buffer = bytearray()
    for record in records:
        buffer += _LENGTH.pack(len(record))
        buffer += record
        if len(buffer) >= BLOCK:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


def _blocks(path: Path) -> Iterator[list[bytes]]:
    """The records of a run, some at a time; the file is removed once it has been read."""
    with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as expanded:
        source = io.BufferedReader(cast(io.RawIOBase, expanded), BLOCK)
        while block := _block(cast(BinaryIO, source), path):
            yield block
    path.unlink()


def _block(source: BinaryIO, path: Path) -> list[bytes]:
    block: list[bytes] = []
    held = 0
    while held < BLOCK and (head := source.read(4)):
        length = _LENGTH.unpack(head)[0] if len(head) == 4 else -1
        record = source.read(length) if length >= 0 else b""
        if len(record) != length:
            raise StorageError(f"The scratch file {path} was cut short while it was in use.", transient=True)
        block.append(record)
        held += length
    return block


def _merged(runs: list[Iterator[list[bytes]]]) -> Iterator[bytes]:
    """Merge sorted runs, many records at a step.

    Everything up to the smallest of the blocks' last records can be given out at once: no block that is
    still to come holds anything smaller. Sorting those pieces together is C code that finds them sorted
    already, several times faster than a heap asked once a record.
    """
    heads = [[next(run, []), run] for run in runs]
    while heads := [head for head in heads if head[0]]:
        bound = min(cast(list[bytes], block)[-1] for block, _ in heads)
        ready: list[bytes] = []
        for head in heads:
            block, run = cast(list[bytes], head[0]), cast(Iterator[list[bytes]], head[1])
            end = bisect_right(block, bound)
            ready += block[:end]
            head[0] = block[end:] if end < len(block) else next(run, [])
        ready.sort()
        yield from ready
