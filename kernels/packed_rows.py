"""The rows of a step as every attention sees them: lengths and block tables, and no tensors.

What an implementation derives from them (gathers, masks, work items) it keeps here, so that it is made
once a step and serves all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar, cast

from pagemill.kernels.cache_write import BLOCK_SIZE

T = TypeVar("T")


class PackedRows:
    """Rows of a step, packed one after another; row i has query_lengths[i] new tokens of lengths[i].

    block_tables: block ids of each row, enough to hold its length. share_prefixes: whether blocks at the head
    of several tables may be read once for all of those rows, which changes no result. as_runs: on a card,
    rows of one token are computed as those of more are, so that a token has the same bits in both.
    """

    __slots__ = ("_derived", "as_runs", "block_tables", "lengths", "query_lengths", "share_prefixes")

    def __init__(
        self,
        query_lengths: Sequence[int],
        lengths: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        share_prefixes: bool = True,
        as_runs: bool = False,
    ) -> None:
        """Raises ValueError where these contradict each other: attention over memory that holds nothing
        would not fail, it would answer wrongly."""
        for i, (new, length, table) in enumerate(zip(query_lengths, lengths, block_tables, strict=True)):
            if not 1 <= new <= length:
                raise ValueError(f"row {i} has {new} new tokens of {length}")
            if len(table) * BLOCK_SIZE < length:
                raise ValueError(f"row {i} has {len(table)} blocks for {length} tokens")
        self.query_lengths = tuple(query_lengths)
        self.lengths = tuple(lengths)
        self.block_tables = tuple(block_tables)
        self.share_prefixes = share_prefixes
        self.as_runs = as_runs
        self._derived: dict[Hashable, object] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made at the first call with this key."""
        if key not in self._derived:
            self._derived[key] = make()
        return cast(T, self._derived[key])


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
