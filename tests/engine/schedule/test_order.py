"""The order of waiting rows: priority, common prefixes together, nobody for ever."""

from __future__ import annotations

import gc

import pytest
from engine_fakes import prompt, request
from hypothesis import given
from hypothesis import strategies as st

from pagemill.engine.schedule.order import WaitingQueue
from pagemill.engine.sequence import Sequence, Status

_arrivals = iter(range(10**9))


def row(name: str, ids: list[int], priority: int = 0, group: str = "", work: float = 1.0) -> Sequence:
    seq = Sequence.of(request(name, ids, priority=priority, group=group), arrival=next(_arrivals))
    seq.work = work
    return seq


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


@pytest.mark.parametrize("begun", [False, True])
def test_rows_that_have_ended_are_not_kept_and_the_order_stays(begun: bool) -> None:
    queues = [WaitingQueue(), WaitingQueue()]
    # In the second queue all of them end, but for the first hundred, which is noticed as it grows.
    for queue in queues:
        for n in range(100):
            queue.push(row(f"{n}", prompt(32, n % 7), n % 2, "ab"[n % 3 == 0], work=n % 5))
        if begun:
            back = [queue.pop() for _ in range(9)]
            for seq in back[:3]:
                assert seq is not None
                queue.push_first(seq)
            for seq in back[3:]:
                assert seq is not None
                queue.push_back(seq)
    for n in range(20_000):
        seq = row(f"x{n}", prompt(32, n), n % 2, "ab"[n % 3 == 0])
        queues[1].push(seq)
        seq.status = Status.FINISHED
        queues[1].trim(100)
        assert queues[1]._size <= 1201
    kept = sum(type(it) is Sequence and it.status is Status.FINISHED for it in gc.get_objects())
    assert kept <= 1201
    assert names(queues[0]) == names(queues[1])


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([1, 2]), max_size=4),
            st.integers(0, 15),
            st.integers(0, 1),
            st.sampled_from("ab"),
            st.integers(1, 9),
            st.sampled_from(["", "", "first", "back"]),
        ),
        max_size=40,
    ),
    st.integers(1, 5),
)
def test_every_row_comes_out_exactly_once(
    rows: list[tuple[list[int], int, int, str, int, str]], between: int
) -> None:
    """Rows are paths of blocks with a tail; pushes and pops in turn, and some that were popped come back."""
    queue = WaitingQueue()
    out: list[str] = []
    for n, (path, tail, priority, group, work, again) in enumerate(rows):
        ids = [token for block in path for token in [block] * 16] + [9] * tail
        queue.push(row(f"{n}", ids or [1], priority, group, work))
        if n % between == 0 and (seq := queue.pop()) is not None:
            if again:
                (queue.push_first if again == "first" else queue.push_back)(seq)
            else:
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


# Long rows first


def test_long_rows_lead_and_take_their_prefix_along() -> None:
    queue = WaitingQueue()
    common = prompt(32)
    queue.push(row("short", prompt(20, 7), work=10))
    queue.push(row("with long", [*common, 1], work=5))
    queue.push(row("middle", prompt(20, 8), work=50))
    queue.push(row("long", [*common, 2], work=90))
    assert names(queue) == ["long", "with long", "middle", "short"]


def test_rows_of_equal_work_come_in_order_of_arrival() -> None:
    queue = WaitingQueue()
    for n in range(20):
        queue.push(row(f"{n}", prompt(20, n), work=7.0))
    assert names(queue) == [f"{n}" for n in range(20)]


def test_switched_off_work_counts_for_nothing() -> None:
    queue = WaitingQueue(long_first=False)
    for n in range(5):
        queue.push(row(f"{n}", prompt(20, n), work=n))
    assert names(queue) == [f"{n}" for n in range(5)]


def test_a_short_row_is_not_kept_waiting_by_long_ones_that_go_on_coming() -> None:
    queue = WaitingQueue()
    queue.push(row("short", prompt(20), work=1))
    for n in range(3):
        queue.push(row(f"{n}", prompt(20, n + 2), work=100))
    popped = []
    for n in range(6):
        seq = queue.pop()
        assert seq is not None
        popped.append(seq.request.request_id)
        queue.push(row(f"late{n}", prompt(20, n + 9), work=100))
    assert "short" in popped[:4]


# Groups


def pushed(group: str, count: int, work: float = 1.0, queue: WaitingQueue | None = None) -> WaitingQueue:
    queue = queue or WaitingQueue()
    for n in range(count):
        queue.push(row(f"{group}{n}", prompt(20, n), group=group, work=work))
    return queue


def groups(queue: WaitingQueue, count: int) -> str:
    popped = [queue.pop() for _ in range(count)]
    return "".join(seq.request.group for seq in popped if seq is not None)


def test_a_small_group_behind_a_huge_one_comes_through_at_half_speed() -> None:
    queue = pushed("a", 1000)
    groups(queue, 100)
    pushed("b", 10, queue=queue)
    assert groups(queue, 20).count("b") == 10
    assert len(names(queue)) == 890


def test_groups_share_by_work_and_not_by_rows() -> None:
    queue = pushed("b", 1000, work=10, queue=pushed("a", 1000, work=100))
    taken = groups(queue, 440)
    assert taken.count("b") == pytest.approx(400, abs=10)
    assert taken.count("a") == pytest.approx(40, abs=2)


def test_a_group_that_comes_again_has_saved_nothing_up() -> None:
    queue = pushed("b", 1, queue=pushed("a", 1000))
    groups(queue, 500)
    pushed("b", 100, queue=queue)
    assert abs(groups(queue, 100).count("b") - 50) <= 1


def test_rows_that_come_back_to_their_group_go_first_there_and_are_charged_once() -> None:
    queue = pushed("b", 100, queue=pushed("a", 100))
    popped = [queue.pop() for _ in range(20)]
    for seq in popped:
        if seq is not None and seq.request.group == "a":
            queue.push_back(seq)
    following = [queue.pop() for _ in range(60)]
    found = [seq.request.request_id for seq in following if seq is not None]
    of_a = [name for name in found if name.startswith("a")]
    of_b = [name for name in found if name.startswith("b")]
    assert of_a == [f"a{n}" for n in range(len(of_a))]
    assert of_b == [f"b{n}" for n in range(10, 10 + len(of_b))]
    assert abs(len(of_a) - (len(of_b) + 10)) <= 1, "What came back was charged twice."


def test_priority_comes_before_fairness() -> None:
    queue = pushed("a", 5)
    for n in range(3):
        queue.push(row(f"b{n}", prompt(20, n), priority=1, group="b", work=100))
    assert groups(queue, 8) == "bbbaaaaa"


def test_a_row_whose_priority_is_raised_comes_once() -> None:
    queue = WaitingQueue()
    seq, other = row("hurried", prompt(20)), row("other", prompt(20, 2), priority=1)
    for it in (seq, other):
        queue.push(it)
    seq.priority = 2
    queue.push(seq)
    assert names(queue) == ["hurried", "other"]
