"""What the row table is told of a row: everything once, and then what has changed."""

from __future__ import annotations

from tiny_models import sequence

from pagemill.engine.run.slots import Slots
from pagemill.engine.sequence import Sequence, Status


def running(ids: list[int], blocks: list[int]) -> Sequence:
    seq = sequence(ids)
    seq.status, seq.block_table = Status.RUNNING, blocks
    return seq


def test_a_row_is_told_of_once_and_then_its_new_blocks() -> None:
    slots = Slots(4, width=8)
    row = running([5, 6, 7], [3])
    first = slots.changes([(row, 3)])
    assert first["header_slots"].tolist() == [0] and first["lengths"].tolist() == [3]
    assert first["last"].tolist() == [7] and first["block_values"].tolist() == [3]
    slots.told([(row, 3)])
    slots.advanced([(row, 3)])
    row.num_unread_tokens = 1
    row.block_table += [9]
    second = slots.changes([(row, 4)])
    assert second["header_slots"].size == 0
    assert (second["block_places"].tolist(), second["block_values"].tolist()) == ([1], [9])


def test_what_was_not_sent_is_told_again() -> None:
    slots, row = Slots(4, width=8), running([5, 6], [3])
    assert (
        slots.changes([(row, 2)])["lengths"].tolist() == slots.changes([(row, 2)])["lengths"].tolist() == [2]
    )


def test_a_row_with_other_memory_is_told_all_its_blocks() -> None:
    """As after a preemption, with as many tokens as before."""
    slots, row = Slots(4, width=8), running([5, 6], [3, 4])
    slots.told([(row, 2)])
    row.block_table = [7, 8]
    assert slots.changes([(row, 2)])["block_values"].tolist() == [7, 8]


def test_lines_of_rows_that_run_no_more_are_given_to_others() -> None:
    slots = Slots(2, width=8)
    first, second, third = (running([i], [i]) for i in range(3))
    assert [slots.of(first), slots.of(second)] == [0, 1]
    first.status = Status.FINISHED
    assert slots.of(third) == 0
    assert slots.of(second) == 1
