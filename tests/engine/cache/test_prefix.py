"""The prefix cache: what counts as the same prefix, and when memory may be found again."""

from __future__ import annotations

from engine_fakes import prompt, request

from pagemill.engine.cache.blocks import BlockPool
from pagemill.engine.cache.prefix import PrefixCache, block_hash, extend_hashes, root_hash
from pagemill.engine.sequence import Sequence


def row(ids: list[int], salt: str = "") -> Sequence:
    return Sequence.of(request("r", ids, salt=salt), arrival=0)


def computed(pool: BlockPool, cache: PrefixCache, seq: Sequence, count: int) -> Sequence:
    """The row with its first `count` tokens computed and published."""
    seq.block_table = pool.take(-(-count // 16))
    seq.num_computed_tokens = count
    cache.publish(seq, 0, count)
    return seq


def test_a_hash_covers_everything_before_it() -> None:
    a, b = row(prompt(32)), row([*prompt(15), 999, *prompt(32)[16:]])
    extend_hashes(a, 2)
    extend_hashes(b, 2)
    assert a.block_hashes[0] != b.block_hashes[0]
    assert a.block_hashes[1] != b.block_hashes[1], "The same 16 tokens after another beginning."


def test_salts_and_token_borders_tell_hashes_apart() -> None:
    assert root_hash("") != root_hash("x")
    # 0x01 0x00 and 0x0100 would spell the same bytes without a fixed width.
    assert block_hash(root_hash(""), [1, 0] * 8) != block_hash(root_hash(""), [256, 1] * 8)
    assert len(block_hash(b"", [0] * 16)) == 32


def test_only_full_computed_blocks_are_found() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    first = computed(pool, cache, row(prompt(40)), 40)
    assert cache.find(row(prompt(40))) == first.block_table[:2]
    assert cache.find(row([*prompt(20), 999, *prompt(40)[21:]])) == first.block_table[:1]
    assert cache.find(row(prompt(40, 2))) == []


def test_the_last_token_is_never_found() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    first = computed(pool, cache, row(prompt(48)), 48)
    assert cache.find(row(prompt(48))) == first.block_table[:2]
    assert cache.find(row(prompt(49))) == first.block_table[:3]


def test_a_gap_ends_the_run() -> None:
    pool = BlockPool(3)
    cache = PrefixCache(pool)
    first = computed(pool, cache, row(prompt(48)), 48)
    table = first.block_table
    pool.release(table[:1])
    pool.take(1)  # the first block is used for something else
    assert cache.find(row(prompt(49))) == []


def test_blocks_are_published_as_steps_fill_them() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    seq = row(prompt(40))
    seq.block_table = pool.take(3)
    seq.num_computed_tokens = 10
    assert cache.publish(seq, 0, 10) == []
    seq.num_computed_tokens = 33
    assert cache.publish(seq, 10, 33) == seq.block_hashes[:2]
    seq.num_computed_tokens = 40
    assert cache.publish(seq, 33, 40) == []


def test_a_cache_switched_off_finds_and_publishes_nothing() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, enabled=False)
    computed(pool, cache, row(prompt(40)), 40)
    assert cache.find(row(prompt(40))) == []
