"""The pool of memory blocks: which are free, how many rows hold each, and what a block contains.

A freed block keeps its label (the hash of its contents) and can be shared again until it is taken for
something else. The pool knows ids and labels; it may not know tokens, rows or tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 0 to num_blocks - 1, each free or held by one or more rows.

    The free ones stand in the order in which they are reused: first those that hold nothing of use, then
    by last use, and of one row's blocks the last first, since a block is of no use without those before it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        # An OrderedDict takes from the front, appends and removes anywhere in constant time; a plain dict
        # scans over its own deleted entries when it is emptied from the front.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._label_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out free blocks; what they contained is forgotten. Raises MemoryError if too few are free."""
        if count > len(self._free):
            raise MemoryError(f"{count} blocks asked for, {len(self._free)} are free.")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
            self._forget(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these, free ones among them."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each block of a row, given in the order of its tokens."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._label_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def label(self, block: int, label: bytes) -> None:
        """Say what a held block contains. Of two blocks with the same contents the first keeps the label."""
        if label not in self._block_of and self._label_of[block] is None:
            self._block_of[label] = block
            self._label_of[block] = label

    def find(self, label: bytes) -> int | None:
        """The block with these contents, held or free."""
        return self._block_of.get(label)

    def is_free(self, block: int) -> bool:
        return self._holders[block] == 0

    def forget_all(self) -> None:
        """Drop every label: nothing computed so far is a hit again."""
        self._block_of.clear()
        self._label_of = [None] * self.num_blocks

    def _forget(self, block: int) -> None:
        label = self._label_of[block]
        if label is not None:
            del self._block_of[label]
            self._label_of[block] = None

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool agrees with the block tables of all rows. For tests."""
        tables = [list(table) for table in tables]
        for table in tables:
            assert len(set(table)) == len(table), f"A row holds a block twice: {table}."
        held = Counter(block for table in tables for block in table)
        for block in range(self.num_blocks):
            assert self._holders[block] == held[block], (
                f"Block {block} counts {self._holders[block]} holders and is in {held[block]} tables."
            )
            assert (block in self._free) == (held[block] == 0), (
                f"Block {block} is both held and free, or neither."
            )
        labelled = {block: label for block, label in enumerate(self._label_of) if label is not None}
        assert self._block_of == {label: block for block, label in labelled.items()}, (
            "Labels and index differ."
        )
        assert len(self._block_of) == len(labelled), "Two blocks have the same label."
