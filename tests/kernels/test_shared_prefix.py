"""Groups of rows that begin with the same blocks, against what comparing the tables row by row says."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagemill.kernels.shared_prefix import shared_prefixes

Groups = list[tuple[list[int], int]]


def groups(
    tables: list[list[int]], counts: list[int] | None = None, at_least: int = 1, together: int = 16
) -> Groups:
    """Groups as (rows, common blocks), in the order of their first rows."""
    lengths = np.array([len(table) for table in tables])
    flat = np.array([block for table in tables for block in table], np.int32)
    usable = lengths if counts is None else np.array(counts)
    found = shared_prefixes(flat, np.cumsum(lengths) - lengths, usable, at_least, together)
    ends = np.cumsum(found.counts)
    rows = [sorted(found.rows[end - n : end].tolist()) for end, n in zip(ends, found.counts, strict=True)]
    return sorted(zip(rows, found.blocks.tolist(), strict=True))


def common(tables: list[list[int]], counts: list[int]) -> int:
    shortest = min(counts)
    return next((i for i in range(shortest) if len({table[i] for table in tables}) > 1), shortest)


def test_rows_with_one_prompt_are_one_group_however_they_lie() -> None:
    tables = [[1, 2, 3, 10], [7, 8], [1, 2, 3, 11, 12], [1, 2, 3, 13]]
    assert groups(tables) == [([0, 2, 3], 3)]


def test_rows_that_share_nothing_make_no_group() -> None:
    assert groups([[1, 2], [3, 4], [5]]) == []
    assert groups([[1, 2]]) == []


def test_the_same_block_at_another_place_is_no_prefix() -> None:
    assert groups([[1, 2, 3], [4, 2, 3], [2, 3]]) == []


def test_two_prompts_are_two_groups() -> None:
    tables = [[1, 2, 3], [5, 6, 7], [1, 2, 4], [5, 6, 8]]
    assert groups(tables) == [([0, 2], 2), ([1, 3], 2)]


def test_blocks_that_may_not_be_shared_are_not() -> None:
    assert groups([[1, 2, 3], [1, 2, 3]], counts=[2, 3]) == [([0, 1], 2)]
    assert groups([[1, 2, 3], [1, 2, 3]], counts=[0, 3]) == []


def test_too_few_common_blocks_make_no_group() -> None:
    assert groups([[1, 2, 3], [1, 2, 4]], at_least=3) == []
    assert groups([[1, 2, 3], [1, 2, 4]], at_least=2) == [([0, 1], 2)]


def test_a_nested_prefix_is_cut_where_that_reads_less() -> None:
    long = list(range(100, 140))
    # Two prompts of 40 blocks behind 2 common ones: each by itself reads 42 once instead of four times.
    tables = [
        [1, 2, *long, 9],
        [1, 2, *long, 8],
        [1, 2, *(b + 50 for b in long)],
        [1, 2, *(b + 50 for b in long)],
    ]
    assert groups(tables) == [([0, 1], 42), ([2, 3], 42)]
    # Others that have only the 2 in common share those among themselves.
    assert groups([*tables, [1, 2, 7], [1, 2, 6]]) == [([0, 1], 42), ([2, 3], 42), ([4, 5], 2)]
    # One block of difference is not worth reading 40 a second time.
    tables = [[*long, 1, 9], [*long, 1, 8], [*long, 2, 7], [*long, 2, 6]]
    assert groups(tables) == [([0, 1, 2, 3], 40)]


@given(
    parents=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=40
    ),
    at_least=st.integers(1, 4),
    together=st.integers(2, 16),
    data=st.data(),
)
def test_every_group_has_in_common_what_it_says(
    parents: list[tuple[int, int, int]], at_least: int, together: int, data: st.DataObject
) -> None:
    tables: list[list[int]] = []
    for parent, kept, more in parents:
        head = tables[parent % len(tables)][:kept] if tables else []
        fresh = 1000 * len(tables)
        tables.append(head + list(range(fresh, fresh + more + (not head))))
    counts = [data.draw(st.integers(0, len(table))) for table in tables]
    found = groups(tables, counts, at_least, together)
    rows = [row for members, _ in found for row in members]
    assert len(rows) == len(set(rows))
    for members, depth in found:
        assert len(members) > 1
        assert depth >= at_least
        assert depth == common([tables[row] for row in members], [counts[row] for row in members])
    if not found:
        for i, row in enumerate(tables):
            for j, other in enumerate(tables[:i]):
                assert common([row, other], [counts[i], counts[j]]) < at_least
