"""The order of rows that wait: by priority, then so that rows with a common prefix follow one another.

Rows of one priority are taken in sweeps. A sweep is everything that waited when it began, as a prefix tree
over 16-token blocks walked depth first: each common prefix is computed once, and used by all its rows
before its memory is given to another. What arrives meanwhile waits for the next sweep, so a stream of rows
with a popular prefix can't keep the others waiting for ever. A plain sort would do the same at a price that
grows with the queue; the tree costs a row the blocks that it shares.

Rows that come back (preempted, put back, released) go before all of their priority, in order of arrival.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from pagemill.engine.cache.prefix import extend_hashes
from pagemill.engine.config import BLOCK_SIZE
from pagemill.engine.sequence import Sequence, Status


@dataclass(slots=True, eq=False)
class _Node:
    """A common prefix. A child that is a single row is split no further until a second one comes."""

    rows: deque[Sequence] = field(default_factory=deque)
    children: OrderedDict[bytes, _Node | Sequence] = field(default_factory=OrderedDict)


class PrefixTree:
    """Rows by common prefix; without one to look at (`by_prefix` off) a plain queue.

    `pop` walks depth first, older branches first, and takes the tree apart: nothing is pushed any more
    once the first row has been popped.
    """

    def __init__(self, *, by_prefix: bool = True) -> None:
        self._by_prefix = by_prefix
        self._root = _Node()
        self._path = [self._root]

    def push(self, seq: Sequence) -> None:
        node, depth = self._root, 0
        while (key := self._key(seq, depth)) is not None:
            child = node.children.get(key)
            if child is None:
                node.children[key] = seq
                return
            depth += 1
            if isinstance(child, Sequence):
                child = node.children[key] = self._split(child, depth)
            node = child
        node.rows.append(seq)

    def pop(self) -> Sequence | None:
        while self._path:
            node = self._path[-1]
            if node.rows:
                return node.rows.popleft()
            if not node.children:
                self._path.pop()
                continue
            _, child = node.children.popitem(last=False)
            if isinstance(child, Sequence):
                return child
            self._path.append(child)
        return None

    def _split(self, seq: Sequence, depth: int) -> _Node:
        """The row in a node of its own, at `depth`, where others can join it."""
        node = _Node()
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


class _Lane:
    """The rows of one priority."""

    def __init__(self, *, by_prefix: bool) -> None:
        self._by_prefix = by_prefix
        self._first: list[tuple[int, Sequence]] = []
        self._sweep = PrefixTree(by_prefix=by_prefix)
        self._next = PrefixTree(by_prefix=by_prefix)

    def push(self, seq: Sequence) -> None:
        self._next.push(seq)

    def push_first(self, seq: Sequence) -> None:
        heapq.heappush(self._first, (seq.arrival, seq))

    def pop(self) -> Sequence | None:
        if self._first:
            return heapq.heappop(self._first)[1]
        seq = self._sweep.pop()
        if seq is None:
            self._sweep, self._next = self._next, PrefixTree(by_prefix=self._by_prefix)
            seq = self._sweep.pop()
        return seq


class WaitingQueue:
    """All rows that wait. Rows that have ended meanwhile stay inside until they would be popped."""

    def __init__(self, *, by_prefix: bool = True) -> None:
        self._by_prefix = by_prefix
        self._lanes: dict[int, _Lane] = {}
        self._order: list[int] = []  # priorities in use, negated, so that the highest comes first

    def push(self, seq: Sequence) -> None:
        self._lane(seq).push(seq)

    def push_first(self, seq: Sequence) -> None:
        """A row that was popped before: it goes ahead of its priority, in order of arrival."""
        self._lane(seq).push_first(seq)

    def pop(self) -> Sequence | None:
        while self._order:
            lane = self._lanes[-self._order[0]]
            while (seq := lane.pop()) is not None:
                if seq.status is Status.WAITING:
                    return seq
            del self._lanes[-self._order.pop(0)]
        return None

    def _lane(self, seq: Sequence) -> _Lane:
        priority = seq.request.priority
        lane = self._lanes.get(priority)
        if lane is None:
            lane = self._lanes[priority] = _Lane(by_prefix=self._by_prefix)
            insort(self._order, -priority)
        return lane
