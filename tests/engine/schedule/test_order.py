"""The order of waiting rows: priority, common prefixes together, nobody for ever."""

from __future__ import annotations

from engine_fakes import prompt, request
from hypothesis import given
from hypothesis import strategies as st

from pagemill.engine.schedule.order import WaitingQueue
from pagemill.engine.sequence import Sequence, Status

_arrivals = iter(range(10**9))


def row(name: str, ids: list[int], priority: int = 0) -> Sequence:
    return Sequence.of(request(name, ids, priority=priority), arrival=next(_arrivals))


def names(queue: WaitingQueue) -> list[str]:
    out = []
    while (seq := queue.pop()) is not None:
        out.append(seq.request.request_id)
    return out


def test_rows_with_a_common_prefix_come_together_in_order_of_arrival() -> None:
    queue = WaitingQueue()
    a, b = prompt(32, 1), prompt(32, 2)
    for n, ids in enumerate([a, b, a, b, a]):
        queue.push(row(f"{n}", [*ids, *prompt(20, n + 10)]))
    assert names(queue) == ["0", "2", "4", "1", "3"]


def test_a_longer_common_prefix_binds_more_closely() -> None:
    queue = WaitingQueue()
    common = prompt(16)
    left, right = [*common, *prompt(16, 2)], [*common, *prompt(16, 3)]
    for name, ids in {"l1": left, "r1": right, "short": prompt(20), "l2": left, "r2": right}.items():
        queue.push(row(name, [*ids, 5]))
    assert names(queue) == ["short", "l1", "l2", "r1", "r2"]


def test_without_prefixes_rows_come_in_order_of_arrival() -> None:
    queue = WaitingQueue(by_prefix=False)
    for n in range(6):
        queue.push(row(f"{n}", prompt(32, n % 2)))
    assert names(queue) == [f"{n}" for n in range(6)]


def test_what_arrives_during_a_sweep_waits_for_the_next() -> None:
    queue = WaitingQueue()
    popular = prompt(32, 1)
    queue.push(row("first", popular))
    queue.push(row("other", prompt(32, 2)))
    assert queue.pop().request.request_id == "first"  # type: ignore[union-attr]
    for n in range(50):
        queue.push(row(f"late{n}", popular))
    assert queue.pop().request.request_id == "other"  # type: ignore[union-attr]


def test_rows_that_come_back_go_first() -> None:
    queue = WaitingQueue()
    early, late, new = row("early", prompt(8)), row("late", prompt(8)), row("new", prompt(8))
    queue.push(new)
    queue.push_first(late)
    queue.push_first(early)
    assert names(queue) == ["early", "late", "new"]


def test_priorities_come_before_everything_else() -> None:
    queue = WaitingQueue()
    queue.push_first(row("back", prompt(8)))
    queue.push(row("low", prompt(8), priority=-1))
    queue.push(row("high", prompt(8), priority=7))
    assert queue.pop().request.request_id == "high"  # type: ignore[union-attr]
    queue.push(row("higher", prompt(8), priority=9))
    assert names(queue) == ["higher", "back", "low"]


def test_rows_that_have_ended_are_passed_over() -> None:
    queue = WaitingQueue()
    rows = [row(f"{n}", prompt(32)) for n in range(4)]
    for seq in rows:
        queue.push(seq)
    rows[0].status = rows[2].status = Status.FINISHED
    assert names(queue) == ["1", "3"]


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from([1, 2]), max_size=4), st.integers(0, 15), st.integers(0, 1)),
        max_size=40,
    ),
    st.integers(1, 5),
)
def test_every_row_comes_out_exactly_once(rows: list[tuple[list[int], int, int]], between: int) -> None:
    """Rows are paths of blocks with a tail; pushes and pops in turn."""
    queue = WaitingQueue()
    out: list[str] = []
    for n, (path, tail, priority) in enumerate(rows):
        ids = [token for block in path for token in [block] * 16] + [9] * tail
        queue.push(row(f"{n}", ids or [1], priority))
        if n % between == 0 and (seq := queue.pop()) is not None:
            out.append(seq.request.request_id)
    out += names(queue)
    assert sorted(out, key=int) == [f"{n}" for n in range(len(rows))]


def test_hashes_are_made_only_as_deep_as_rows_have_something_in_common() -> None:
    queue = WaitingQueue()
    lone, one, two = row("lone", prompt(160, 1)), row("one", prompt(160, 2)), row("two", prompt(160, 2))
    for seq in (lone, one, two):
        queue.push(seq)
    assert len(lone.block_hashes) == 1
    assert len(one.block_hashes) == len(two.block_hashes) == 10
