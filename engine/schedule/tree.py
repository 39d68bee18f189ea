"""Waiting rows as a prefix tree: rows with a common prefix follow one another, long ones lead.

A tree over 16-token blocks, walked depth first: each common prefix is computed once, and used by all its
rows before its memory is given to another. A plain sort would do the same at a price that grows with the
queue; the tree costs a row the blocks that it shares. Among rows and branches that begin alike, those with
the most work in one row come first: whatever starts last keeps the engine waiting when all else is done, so
it had better be short (longest processing time first, Graham 1969). This file may not know who is let in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from pagemill.engine.cache.prefix import extend_hashes
from pagemill.engine.config import BLOCK_SIZE
from pagemill.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class _Node:
    """A common prefix. A child that is a single row is split no further until a second one comes.

    work: the most of any row below.
    """

    work: float = 0.0
    rows: list[Sequence] = field(default_factory=list)
    children: dict[bytes, _Node | Sequence] = field(default_factory=dict)


_Entry: TypeAlias = _Node | Sequence


class PrefixTree:
    """Rows by common prefix; without one to look at (`by_prefix` off) all of them side by side.

    `pop` takes the tree apart: nothing is pushed any more once the first row has been popped. Where neither
    prefix nor work (`long_first`) says otherwise, rows come as they were pushed.
    """

    def __init__(self, *, by_prefix: bool = True, long_first: bool = True) -> None:
        self._by_prefix = by_prefix
        self._long_first = long_first
        self._root = _Node()
        self._path: list[list[_Entry]] | None = None  # what is left of each open node, the next one last

    def push(self, seq: Sequence) -> None:
        node, depth = self._root, 0
        while (key := self._key(seq, depth)) is not None:
            node.work = max(node.work, seq.work)
            child = node.children.get(key)
            if child is None:
                node.children[key] = seq
                return
            depth += 1
            if isinstance(child, Sequence):
                child = node.children[key] = self._split(child, depth)
            node = child
        node.work = max(node.work, seq.work)
        node.rows.append(seq)

    def pop(self) -> Sequence | None:
        if self._path is None:
            self._path = [self._open(self._root)]
        while self._path:
            if not self._path[-1]:
                self._path.pop()
                continue
            following = self._path[-1].pop()
            if isinstance(following, Sequence):
                return following
            self._path.append(self._open(following))
        return None

    def _open(self, node: _Node) -> list[_Entry]:
        entries: list[_Entry] = [*node.rows, *node.children.values()]
        if self._long_first:
            entries.sort(key=lambda entry: entry.work, reverse=True)  # stable: equals keep their order
        entries.reverse()
        return entries

    def _split(self, seq: Sequence, depth: int) -> _Node:
        """The row in a node of its own, at `depth`, where others can join it."""
        node = _Node(seq.work)
        key = self._key(seq, depth)
        if key is None:
            node.rows.append(seq)
        else:
            node.children[key] = seq
        return node

    def _key(self, seq: Sequence, depth: int) -> bytes | None:
        """The hash of the row's block at this depth, made only as deep as rows have something in common."""
        if not self._by_prefix or (depth + 1) * BLOCK_SIZE > seq.num_prompt_tokens:
            return None
        extend_hashes(seq, depth + 1)
        return seq.block_hashes[depth]
