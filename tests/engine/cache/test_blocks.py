"""The block pool: what is taken, shared, freed and used again."""

from __future__ import annotations

import pytest

from pagemill.engine.cache.blocks import BlockPool


def test_blocks_are_handed_out_until_none_is_left() -> None:
    pool = BlockPool(3)
    taken = pool.take(3)
    assert sorted(taken) == [0, 1, 2]
    assert (pool.num_free, pool.num_used) == (0, 3)
    with pytest.raises(MemoryError, match="1 blocks asked for, 0 are free"):
        pool.take(1)
    pool.check([taken])


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    block = pool.take(1)
    pool.share(block)
    pool.release(block)
    assert not pool.is_free(block[0])
    pool.check([block])
    pool.release(block)
    assert pool.is_free(block[0])
    pool.check([])


def test_a_freed_block_keeps_its_label_until_it_is_taken() -> None:
    pool = BlockPool(2)
    first = pool.take(1)
    pool.label(first[0], b"first")
    pool.release(first)
    assert pool.find(b"first") == first[0]
    pool.share(first)
    assert pool.find(b"first") == first[0]
    pool.release(first)
    pool.take(2)
    assert pool.find(b"first") is None


def test_blocks_without_a_label_are_used_again_first() -> None:
    pool = BlockPool(2)
    labelled, plain = pool.take(2)
    pool.label(labelled, b"x")
    pool.release([labelled])
    pool.release([plain])
    assert pool.take(1) == [plain]
    assert pool.find(b"x") == labelled


def test_the_least_recently_used_goes_first_and_of_a_row_its_tail() -> None:
    pool = BlockPool(4)
    old, new = pool.take(2), pool.take(2)
    for n, block in enumerate([*old, *new]):
        pool.label(block, bytes([n]))
    pool.release(old)
    pool.release(new)
    # A hit on the older row makes it the newer one.
    pool.share(old)
    pool.release(old)
    assert pool.take(4) == [new[1], new[0], old[1], old[0]]


def test_of_two_equal_blocks_the_first_keeps_the_label() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.label(first, b"same")
    pool.label(second, b"same")
    assert pool.find(b"same") == first
    pool.release([first])
    pool.release([second])
    # The second holds nothing that could be found, so it goes before the labelled one.
    assert pool.take(1) == [second]
    pool.check([[second]])


def test_labels_can_all_be_forgotten() -> None:
    pool = BlockPool(1)
    block = pool.take(1)
    pool.label(block[0], b"x")
    pool.forget_all()
    assert pool.find(b"x") is None
    pool.check([block])


@pytest.mark.parametrize("tables", [[[0], [0]], [[0, 0]], [[]], [[0, 1]]])
def test_check_finds_tables_that_do_not_agree(tables: list[list[int]]) -> None:
    pool = BlockPool(2)
    pool.take(1)
    with pytest.raises(AssertionError):
        pool.check(tables)


def test_check_finds_labels_that_do_not_agree() -> None:
    pool = BlockPool(2)
    held = pool.take(1)
    pool.label(held[0], b"x")
    pool._block_of[b"y"] = 1
    with pytest.raises(AssertionError, match="Labels and index differ"):
        pool.check([held])
