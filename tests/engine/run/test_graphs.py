"""Which sizes are captured, and how much each holds."""

from __future__ import annotations

import pytest

from pagemill.engine.run.graphs import held_by, sizes_up_to

pytest.importorskip("triton")


@pytest.mark.parametrize("rows", [1, 3, 64, 100, 256, 1024, 1500])
def test_sizes_begin_with_the_largest_and_reach_down_to_one(rows: int) -> None:
    sizes = sizes_up_to(rows)
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[0] == rows and sizes[-1] == 1
    for fewer, more in zip(sizes[1:], sizes, strict=False):
        assert more <= max(2 * fewer, fewer + 8), "Too much would be computed for nobody."


def test_a_graph_holds_all_its_rows_at_full_context_if_that_is_little() -> None:
    held = held_by(4, 1000)
    assert (held.rows, held.small_items, held.parts) == (4, 16, 16)
    assert held.table_blocks * 16 >= 4 * 1000
    assert held_by(1024, 131_072).small_items == 4096
