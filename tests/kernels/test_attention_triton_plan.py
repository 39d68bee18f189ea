"""How a step is cut for a CUDA device: every key that a row sees is in one item or tile, once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.kernels.attention_triton_plan import SMALL_TILE, SPLIT, SPLIT_BLOCKS, StepPlan, plan_step
from pagemill.kernels.packed_rows import PackedRows, blocks_for

RUN_ROWS, LARGE_ROWS = 128, 64


def packed(rows: list[tuple[int, int, int, int]], share: bool = True) -> PackedRows:
    """Rows of (new tokens, length, prompt, blocks in common with all rows of that prompt)."""
    tables, free = [], 10_000
    for _, length, prompt, shared in rows:
        count = blocks_for(length)
        shared = min(shared, count)
        tables.append([1000 * prompt + i for i in range(shared)] + list(range(free, free + count - shared)))
        free += count
    return PackedRows([row[0] for row in rows], [row[1] for row in rows], tables, share)


def plan(rows: PackedRows, group: int = 4, window: int | None = None) -> StepPlan:
    return plan_step(rows, group, window, RUN_ROWS, LARGE_ROWS)


def check(rows: PackedRows, group: int, window: int | None) -> None:
    step = plan(rows, group, window)
    tables = [list(table) for table in rows.block_tables]
    starts = np.cumsum([0, *rows.query_lengths])
    decoding = {int(starts[i]): i for i, new in enumerate(rows.query_lengths) if new == 1}
    assert sorted(step.rows[:, 0].tolist()) == sorted(decoding)
    seen: dict[int, list[int]] = {row: [] for row in decoding.values()}
    for items, most in ((step.small_items, SMALL_TILE), (step.large_items, LARGE_ROWS)):
        for first, count, split, _ in items.tolist():
            assert 1 <= count * group <= most
            members = [decoding[int(step.rows[k, 0])] for k in range(first, first + count)]
            blocks = {
                tuple(tables[row][split * SPLIT_BLOCKS : (split + 1) * SPLIT_BLOCKS]) for row in members
            }
            assert len(blocks) == 1
            for row in members:
                assert count == 1 or (split + 1) * SPLIT <= rows.lengths[row]
                seen[row].append(split)
    parts: list[int] = []
    for token, length, place, first, splits, part, *_ in step.rows.tolist():
        row = decoding[token]
        assert length == rows.lengths[row]
        assert step.tables[place : place + len(tables[row])].tolist() == tables[row]
        assert sorted(seen[row]) == list(range(first, first + splits))
        lowest = 0 if window is None else max(0, length - window)
        assert (first, first + splits) == (lowest // SPLIT, -(-length // SPLIT))
        parts += range(part, part + splits) if splits > 1 else []
    assert sorted(parts) == list(range(step.parts))

    tokens: list[int] = []
    for token, count, position, place in step.tiles.tolist():
        row = int(np.searchsorted(starts, token, side="right")) - 1
        assert count * group <= RUN_ROWS
        assert position == rows.lengths[row] - rows.query_lengths[row] + token - starts[row]
        assert step.tables[place : place + len(tables[row])].tolist() == tables[row]
        tokens += range(token, token + count)
    wanted = [
        t for i, new in enumerate(rows.query_lengths) if new > 1 for t in range(starts[i], starts[i + 1])
    ]
    assert sorted(tokens) == wanted


row = st.tuples(
    st.sampled_from([1, 1, 1, 1, 2, 40, 300]),
    st.integers(300, 1500) | st.sampled_from([300, 511, 512, 513]),
    st.integers(0, 2),
    st.sampled_from([0, 3, 16, 17, 33, 64]),
)


@settings(max_examples=100)
@given(st.lists(row, max_size=20), st.integers(1, 8), st.none() | st.integers(1, 1600), st.booleans())
def test_every_key_that_a_row_sees_is_met_once(
    rows: list[tuple[int, int, int, int]], group: int, window: int | None, share: bool
) -> None:
    check(packed(rows, share), group, window)


def test_short_rows_have_one_split_and_no_part() -> None:
    step = plan(packed([(1, n, 0, 0) for n in (1, 16, 255, 256)]))
    assert step.parts == 0
    assert len(step.small_items) == 4
    assert len(step.large_items) == 0


@pytest.mark.parametrize(("common", "shared"), [(15, 0), (16, 1), (31, 1), (32, 2), (40, 2)])
def test_a_common_prefix_is_read_once_by_whole_splits(common: int, shared: int) -> None:
    step = plan(packed([(1, 1000, 0, common)] * 16))
    assert len(step.large_items) == shared
    assert len(step.small_items) == 16 * (4 - shared)


def test_two_rows_with_a_common_prefix_fit_a_small_tile() -> None:
    step = plan(packed([(1, 600, 0, 32)] * 2), group=8)
    assert len(step.large_items) == 0
    assert sorted(step.small_items[:, 1].tolist()) == [1, 1, 2, 2]


def test_more_rows_than_a_tile_holds_are_shared_out_evenly() -> None:
    step = plan(packed([(1, 300, 0, 16)] * 17), group=4)
    assert sorted(step.large_items[:, 1].tolist()) == [8, 9]


def test_what_a_window_hides_is_in_no_item() -> None:
    step = plan(packed([(1, 1000, 0, 48)] * 8), window=300)
    assert {int(split) for split in step.large_items[:, 2]} == {2}
    assert {int(split) for split in step.small_items[:, 2]} == {3}


def test_sharing_can_be_left_out() -> None:
    step = plan(packed([(1, 1000, 0, 48)] * 8, share=False))
    assert len(step.large_items) == 0
    assert (step.small_items[:, 1] == 1).all()


def test_a_step_without_rows_has_no_work() -> None:
    step = plan(packed([]))
    assert step.sizes == type(step.sizes)(0, 0, 0, 0, 0, 0)
