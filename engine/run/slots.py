"""The host's side of the row table: which row has which line of it, and what that line holds by now.

Of a line the host sends what has changed: nothing, mostly, but for a block now and then. It knows sequences
and numbers; it may not know the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagemill.engine.sequence import Sequence, Status
from pagemill.kernels.sample import noise_base

Array = npt.NDArray[np.generic]
HEADER = {"header_slots": np.int64, "lengths": np.int32, "last": np.int32, "noise": np.int64}
BLOCKS = {"block_places": np.int64, "block_values": np.int32}


@dataclass(slots=True)
class Line:
    """length: tokens of the row that the table knows, 0 where it knows nothing. blocks: the row's own list,
    which grows in place and is replaced when the row has other memory; sent: how many of them the table has.
    """

    slot: int
    length: int = 0
    blocks: list[int] = field(default_factory=list)
    sent: int = 0


class Slots:
    """width: blocks of a line."""

    def __init__(self, count: int, width: int) -> None:
        self._width = width
        self._free = list(range(count - 1, -1, -1))
        self._lines: dict[Sequence, Line] = {}

    def of(self, seq: Sequence) -> int:
        return self._line(seq).slot

    def _line(self, seq: Sequence) -> Line:
        line = self._lines.get(seq)
        if line is None:
            if not self._free:
                self._sweep()
            line = self._lines[seq] = Line(self._free.pop())
        return line

    def _sweep(self) -> None:
        """Takes back the lines of rows that run no more."""
        for seq in [seq for seq in self._lines if seq.status is not Status.RUNNING]:
            self._free.append(self._lines.pop(seq).slot)

    def changes(self, rows: Many[tuple[Sequence, int]]) -> dict[str, Array]:
        """What the table has to be told before a step in which these rows, of so many tokens, draw the next.

        Of a row whose last token nobody has read the table knows all but new blocks: it has drawn that token.
        """
        header: list[tuple[int, int, int, int]] = []
        places: list[int] = []
        values: list[int] = []
        for seq, length in rows:
            line, sent = self._line(seq), 0
            assert len(seq.block_table) <= self._width, "A row has more blocks than a line of the table."
            if line.length != length:
                assert not seq.num_unread_tokens, "The table has lost a token that only it knows."
                noise = noise_base(seq.request.seed, seq.request.sampling.sample)
                noise -= (noise >> 63) << 64
                header.append((line.slot, length, seq.token_ids[-1], noise))
            if line.blocks is seq.block_table:
                sent = line.sent
            if sent < len(seq.block_table):
                begin = line.slot * self._width
                places += range(begin + sent, begin + len(seq.block_table))
                values += seq.block_table[sent:]
        columns = zip(*header, strict=True) if header else ((),) * 4
        found = {
            name: np.array(column, kind) for (name, kind), column in zip(HEADER.items(), columns, strict=True)
        }
        return found | {
            "block_places": np.array(places, np.int64),
            "block_values": np.array(values, np.int32),
        }

    def told(self, rows: Many[tuple[Sequence, int]]) -> None:
        """The table has been told."""
        for seq, length in rows:
            line = self._line(seq)
            line.length, line.blocks, line.sent = length, seq.block_table, len(seq.block_table)

    def advanced(self, rows: Many[tuple[Sequence, int]]) -> None:
        """The table has put a token behind each."""
        for seq, length in rows:
            self._line(seq).length = length + 1
