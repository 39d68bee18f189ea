from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pagemill.jobs.order import Item, Limits, cut, expected_output, prefix_key, prompt_bytes, shared_bytes
from pagemill.jobs.row import Row


def row(**fields: Any) -> Row:
    empty: dict[str, Any] = {
        "messages": None,
        "prompt": None,
        "prompt_token_ids": None,
        "params": {},
        "seed": 0,
    }
    return Row(**{"row_index": 0, "line": 1, "custom_id": "x", "kind": "completion", **empty, **fields})


def common(left: bytes, right: bytes) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def test_chats_that_begin_alike_have_keys_that_begin_alike() -> None:
    system = {"role": "system", "content": "You are brief. " * 20}
    one, two = (row(messages=[system, {"role": "user", "content": text}]) for text in ("Why?", "What?"))
    shared = shared_bytes(prefix_key(prompt_bytes(one)), prefix_key(prompt_bytes(two)))
    assert shared >= len(system["content"])
    other = row(messages=[{"role": "user", "content": system["content"]}])
    assert shared_bytes(prefix_key(prompt_bytes(one)), prefix_key(prompt_bytes(other))) < 4


def test_token_ids_take_four_bytes_each() -> None:
    assert len(prompt_bytes(row(prompt_token_ids=[1, 2, 2**31 - 1]))) == 1 + 12


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_short_prompts_are_their_own_keys(left: bytes, right: bytes) -> None:
    assert prefix_key(left) == left
    assert shared_bytes(left, right) == common(left, right)


@given(st.integers(0, 70_000), st.integers(0, 3000), st.integers(0, 3000))
def test_what_long_prompts_share_is_known_to_the_kilobyte(shared: int, more: int, less: int) -> None:
    left, right = b"x" * shared + b"l" * more, b"x" * shared + b"r" * less
    told = min(shared_bytes(prefix_key(left), prefix_key(right)), len(left), len(right))
    actual = common(left, right)
    assert told <= actual
    if actual <= 1024:
        assert told == actual
    elif actual <= 32 << 10:
        assert told > actual - 1024
    else:
        assert told >= actual // 2


def test_a_key_is_short_however_long_the_prompt() -> None:
    assert len(prefix_key(b"x" * (16 << 20))) < 1500


def test_documents_behind_one_system_prompt_stay_together() -> None:
    system = b"s" * 5000
    texts = [
        system + bytes([document]) * 3000 + bytes([question])
        for question in range(5)
        for document in range(9)
    ]
    owner = [text[6000] for _, text in sorted((prefix_key(text), text) for text in texts)]
    assert sum(left != right for left, right in pairwise(owner)) == 8


def test_expected_output_follows_the_parameters() -> None:
    assert expected_output(row()) == 256
    assert expected_output(row(params={"max_tokens": 10})) == 10
    assert expected_output(row(params={"max_tokens": 10, "n": 3})) == 30
    assert expected_output(row(params={"max_tokens": 100_000})) == 256
    assert expected_output(row(params={"min_tokens": 1000})) == 1000
    assert expected_output(row(params={"min_tokens": 2**31 - 1, "n": 128})) < 2**32


items = st.lists(
    st.builds(
        lambda size, output, shared: Item(b"", size, output, min(shared, size)),
        st.integers(0, 5000),
        st.integers(0, 300),
        st.integers(0, 5000),
    ),
    max_size=60,
)


@given(items, st.integers(1, 3000), st.integers(1, 12))
def test_shards_hold_all_rows_in_order_within_the_limits(rows: list[Item], tokens: int, most: int) -> None:
    named = [Item(str(n).encode(), item.size, item.output, item.shared) for n, item in enumerate(rows)]
    shards = list(cut(named, Limits(tokens, most)))
    assert [data for shard in shards for data in shard.rows] == [item.data for item in named]
    for shard in shards:
        assert 1 <= len(shard.rows) <= most
        assert shard.tokens <= tokens or len(shard.rows) == 1


def test_a_shard_ends_where_least_is_shared() -> None:
    # Groups of four that share 4,000 bytes; ten rows would fit.
    named = [Item(str(n).encode(), 4400, 10, 4000 if n % 4 else 0) for n in range(24)]
    sizes = [len(shard.rows) for shard in cut(named, Limits(10**9, 10))]
    assert sizes == [8, 8, 8]


def test_shards_are_full_where_nothing_is_shared() -> None:
    named = [Item(b"", 400, 10, n % 7) for n in range(40)]
    assert [len(shard.rows) for shard in cut(named, Limits(10**9, 10))] == [10, 10, 10, 10]


def test_sharing_makes_work_smaller() -> None:
    (alone,) = cut([Item(b"", 4000, 10, 0)] * 2, Limits(10**9, 10))
    (together,) = cut([Item(b"", 4000, 10, 0), Item(b"", 4000, 10, 3600)], Limits(10**9, 10))
    assert (alone.tokens, together.tokens) == (2 * 1011, 1011 + 111)
