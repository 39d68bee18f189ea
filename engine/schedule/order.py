"""The order of rows that wait: by priority, then group by group in turn, then by tree.py.

Rows of one priority are taken from their groups (jobs, say) by fair queueing: a group's turn comes when it
has had the least work so far, where the work of a row is what it is expected to cost. So a hundred rows
behind a million of another job come through at half speed, not at the end (start-time fair queueing, Goyal,
Vin and Cheng 1996). A group that comes anew starts level with the others, whatever it had before.

Rows of one group are taken in sweeps. A sweep is everything that waited when it began. What arrives
meanwhile waits for the next, so a stream of rows with a popular prefix, or of long ones, can't keep the
others waiting for ever.

Rows that were popped before come first: those without memory before all of their priority, those whose
prefix has been computed before all of their group, each in order of arrival.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from pagemill.engine.schedule.tree import PrefixTree
from pagemill.engine.sequence import Sequence, Status

# So many rows that have ended are not worth a look at the others.
_MOST_ENDED = 1000

_Arrivals = list[tuple[int, Sequence]]  # a heap


@dataclass(slots=True, eq=False)
class _Group:
    """Rows of one priority and label. Each row is charged once, when it is first popped, also if it then
    waits for its prefix."""

    label: str
    sweep: PrefixTree
    following: PrefixTree
    first: _Arrivals = field(default_factory=list)


class _Lane:
    """The rows of one priority."""

    def __init__(self, priority: int, make_tree: Callable[[], PrefixTree]) -> None:
        self._priority = priority
        self._make_tree = make_tree
        self._first: _Arrivals = []
        self._groups: dict[str, _Group] = {}
        self._turns: list[tuple[float, int, _Group]] = []  # a heap: whose turn is next
        self._count = itertools.count()
        self._now = 0.0  # how far the lane is: what the group of the last turn had been served before it

    def push(self, seq: Sequence) -> None:
        self._group(seq).following.push(seq)

    def push_first(self, seq: Sequence) -> None:
        heapq.heappush(self._first, (seq.arrival, seq))

    def push_back(self, seq: Sequence) -> None:
        heapq.heappush(self._group(seq).first, (seq.arrival, seq))

    def pop(self) -> Sequence | None:
        while self._first:
            seq = heapq.heappop(self._first)[1]
            if self._waits(seq):
                return seq
        while self._turns:
            self._now, _, group = heapq.heappop(self._turns)
            found = self._pop_from(group)
            if found is not None:
                row, work = found
                self._queue(group, self._now + work)
                return row
            del self._groups[group.label]
        return None

    def sweep_out(self) -> int:
        """Let go of rows that wait here no longer, and return how many do; the order stays."""
        self._first = self._waiting_of(self._first)
        left = len(self._first)
        for group in self._groups.values():
            group.first = self._waiting_of(group.first)
            left += len(group.first)
            # What is left of a sweep has its order; what follows it is ordered anew when its sweep begins.
            group.sweep, in_sweep = self._refilled(group.sweep, PrefixTree(by_prefix=False, long_first=False))
            group.following, after = self._refilled(group.following, self._make_tree())
            left += in_sweep + after
        return left

    def _waiting_of(self, heap: _Arrivals) -> _Arrivals:
        kept = [entry for entry in heap if self._waits(entry[1])]
        heapq.heapify(kept)
        return kept

    def _refilled(self, tree: PrefixTree, into: PrefixTree) -> tuple[PrefixTree, int]:
        count = 0
        while (seq := tree.pop()) is not None:
            if self._waits(seq):
                into.push(seq)
                count += 1
        return into, count

    def _pop_from(self, group: _Group) -> tuple[Sequence, float] | None:
        """The group's next row, and what it is charged: nothing if it was popped, and so charged, before."""
        while group.first:
            seq = heapq.heappop(group.first)[1]
            if self._waits(seq):
                return seq, 0.0
        for _ in range(2):
            while (found := group.sweep.pop()) is not None:
                if self._waits(found):
                    return found, found.work
            group.sweep, group.following = group.following, self._make_tree()
        return None

    def _waits(self, seq: Sequence) -> bool:
        """Not so for a row that has ended, or has been given a higher priority since."""
        return seq.status is Status.WAITING and seq.priority == self._priority

    def _group(self, seq: Sequence) -> _Group:
        label = seq.request.group
        group = self._groups.get(label)
        if group is None:
            group = self._groups[label] = _Group(label, self._make_tree(), self._make_tree())
            self._queue(group, self._now)
        return group

    def _queue(self, group: _Group, served: float) -> None:
        """served: the work of the rows that the group has given, on the lane's scale."""
        heapq.heappush(self._turns, (served, next(self._count), group))


class WaitingQueue:
    """All rows that wait. Rows that have ended meanwhile stay inside until they would be popped, or `trim`
    finds too many of them."""

    def __init__(self, *, by_prefix: bool = True, long_first: bool = True) -> None:
        self._make_tree = lambda: PrefixTree(by_prefix=by_prefix, long_first=long_first)
        self._lanes: dict[int, _Lane] = {}
        self._order: list[int] = []  # priorities in use, negated, so that the highest comes first
        self._size = 0  # at most so many rows are inside, those that have ended too

    def push(self, seq: Sequence) -> None:
        """A new row, or one whose priority has been raised: what was pushed before counts no longer."""
        self._lane(seq).push(seq)

    def push_first(self, seq: Sequence) -> None:
        """A row that was popped before and found no memory, or lost it: nobody of its priority passes it."""
        self._lane(seq).push_first(seq)

    def push_back(self, seq: Sequence) -> None:
        """A row that was popped before and had to wait for its prefix: nobody of its group passes it."""
        self._lane(seq).push_back(seq)

    def pop(self) -> Sequence | None:
        while self._order:
            seq = self._lanes[-self._order[0]].pop()
            if seq is not None:
                self._size -= 1
                return seq
            del self._lanes[-self._order.pop(0)]
        self._size = 0
        return None

    def trim(self, waiting: int) -> None:
        """A row has ended while it waited. waiting: how many still do; there are never many more inside.

        The price of going through all of them is paid by as many that have ended.
        """
        if self._size > 2 * waiting + _MOST_ENDED:
            self._size = sum(lane.sweep_out() for lane in self._lanes.values())

    def _lane(self, seq: Sequence) -> _Lane:
        """Where a row is about to be pushed."""
        self._size += 1
        lane = self._lanes.get(seq.priority)
        if lane is None:
            lane = self._lanes[seq.priority] = _Lane(seq.priority, self._make_tree)
            insort(self._order, -seq.priority)
        return lane
