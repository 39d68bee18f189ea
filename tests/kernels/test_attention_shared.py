"""Rows that begin with the same blocks: read together, each has to the last bit what it has when read
alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagemill.kernels import attention_cpu, attention_cpu_items
from pagemill.kernels import attention_cpu_words as words
from pagemill.kernels.attention_torch import paged_attention as torch_attention
from pagemill.kernels.attention_torch import reference_attention
from pagemill.kernels.cache_write import keys_of, values_of
from pagemill.kernels.packed_rows import PackedRows, blocks_for

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Row:
    """Begins with the first `shared` blocks of prompt `prompt`, has `length` tokens and computes the last
    `new`."""

    prompt: int
    shared: int
    length: int
    new: int = 1


@dataclass
class Step:
    query: Tensor
    layer: Tensor
    rows: list[Row]
    tables: list[list[int]]
    scale: float

    def packed(self, share: bool, chosen: Sequence[int] | None = None) -> PackedRows:
        chosen = range(len(self.rows)) if chosen is None else chosen
        return PackedRows(
            [self.rows[i].new for i in chosen],
            [self.rows[i].length for i in chosen],
            [self.tables[i] for i in chosen],
            share,
        )

    def run(self, share: bool, **options: object) -> Tensor:
        return attention_cpu.paged_attention(
            self.query,
            self.layer,
            self.packed(share),
            self.scale,
            **options,  # type: ignore[arg-type]
        )

    def shared_items(self, window: int | None = None, threads: int = 1) -> list[tuple[int, int]]:
        """(rows, common blocks) of the items that read blocks for several rows."""
        packed = self.packed(True)
        kv_heads, head_dim = self.layer.shape[2], self.query.shape[2]
        shape = attention_cpu_items.Shape(
            self.query.shape[1] // kv_heads, kv_heads, head_dim, self.layer.element_size()
        )
        items, _, _ = attention_cpu_items.plan_items(
            packed, attention_cpu.flat_tables(packed), shape, window or attention_cpu_items.NO_WINDOW, threads
        )
        shared = items[items[:, words.ITEM_TILES] > 1]
        return [(int(item[words.ITEM_TILES]), int(item[words.ITEM_COMMON])) for item in shared]


def make_step(
    rows: list[Row],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Step:
    """Prompts in whole blocks, each row's own tokens in blocks of its own; NaN wherever no row has a
    token."""
    generator = torch.Generator().manual_seed(seed)
    deepest = {row.prompt: max(r.shared for r in rows if r.prompt == row.prompt) for row in rows}
    own = [blocks_for(row.length) - row.shared for row in rows]
    order = torch.randperm(sum(deepest.values()) + sum(own) + 3, generator=generator).tolist()
    storage = torch.full((len(order), 3, 2, kv_heads, head_dim * 16), torch.nan, dtype=dtype)
    layer = storage[:, 1]

    def write(block: int, tokens: int) -> None:
        shape = (kv_heads, head_dim, tokens)
        keys_of(layer, head_dim)[block, :, :, :tokens] = torch.randn(shape, generator=generator).to(dtype)
        values = torch.randn(shape, generator=generator).transpose(1, 2)
        values_of(layer, head_dim)[block, :, :tokens] = values.to(dtype)

    prompts = {}
    for prompt, count in deepest.items():
        prompts[prompt], order = order[:count], order[count:]
        for block in prompts[prompt]:
            write(block, 16)
    tables = []
    for row, count in zip(rows, own, strict=True):
        mine, order = order[:count], order[count:]
        tables.append(prompts[row.prompt][: row.shared] + mine)
        for i, block in enumerate(mine, row.shared):
            write(block, min(16, row.length - 16 * i))
    tokens = sum(row.new for row in rows)
    query = torch.randn((tokens, heads + kv_heads, head_dim), generator=generator).to(dtype)[:, :heads]
    return Step(query, layer, rows, tables, head_dim**-0.5)


def check(step: Step, window: int | None = None, softcap: float | None = None) -> None:
    """To the last bit what is had alone, and near what the reference has."""
    together = step.run(True, window=window, softcap=softcap)
    assert torch.equal(together, step.run(False, window=window, softcap=softcap))
    want = reference_attention(
        step.query.double(), step.layer, step.packed(False), step.scale, window=window, softcap=softcap
    )
    tolerance = TOLERANCE[together.dtype]
    torch.testing.assert_close(together.double(), want, rtol=tolerance, atol=tolerance)


def questions(count: int, shared: int, own: int = 20, prompt: int = 0) -> list[Row]:
    """Rows with one prompt, each a little longer than the one before."""
    return [Row(prompt, shared, shared * 16 + own + 3 * i) for i in range(count)]


# A split is 16 blocks: less than one, one, a little more, and one that begins a third.
@pytest.mark.parametrize("shared", [4, 15, 16, 17, 33])
def test_a_prompt_that_rows_share_is_read_once_for_all_of_them(shared: int) -> None:
    step = make_step(questions(7, shared, own=5))
    assert {common for _, common in step.shared_items()} == {shared}
    assert sum(rows for rows, _ in step.shared_items()) in (7, 14)  # one item for both kv heads, or one each
    check(step)


@pytest.mark.parametrize("own", [1, 16, 250, 300])
def test_what_follows_the_prompt_may_be_a_token_or_many_splits(own: int) -> None:
    step = make_step(questions(6, 20, own=own))
    assert step.shared_items()
    check(step)


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_query_heads_may_share_a_kv_head(group: int, dtype: torch.dtype) -> None:
    step = make_step(questions(9, 6), heads=2 * group, dtype=dtype)
    assert step.shared_items()
    check(step)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_head_dim_that_is_a_multiple_of_16(head_dim: int, dtype: torch.dtype) -> None:
    step = make_step(questions(5, 18), head_dim=head_dim, dtype=dtype)
    assert step.shared_items()
    check(step)


@pytest.mark.parametrize("window", [1, 70, 256, 300, 400, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_hides_part_of_the_prompt_from_each_row(dtype: torch.dtype, window: int) -> None:
    rows = [Row(0, 24, 24 * 16 + own) for own in (1, 5, 16, 17, 18, 40, 41, 60)]
    step = make_step(rows, dtype=dtype)
    assert bool(step.shared_items(window)) == (window > 150)
    check(step, window=window)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_a_softcap_bends_scores(softcap: float) -> None:
    step = make_step(questions(6, 20))
    step.scale = 3.0
    together = step.run(True, softcap=softcap, window=300)
    assert step.shared_items(300)
    assert torch.equal(together, step.run(False, softcap=softcap, window=300))


def test_decodes_share_beside_prefill_chunks_and_rows_of_other_prompts() -> None:
    rows = [
        *questions(5, 20),
        Row(0, 20, 20 * 16 + 50, new=50),
        Row(1, 3, 70, new=9),
        *questions(4, 9, prompt=2),
        Row(3, 0, 300),
        Row(4, 0, 1),
        Row(0, 20, 20 * 16 + 70, new=2),
    ]
    step = make_step(rows)
    assert {common for _, common in step.shared_items()} == {20, 9}
    check(step)


def test_a_prompt_that_is_wholly_shared_computes_its_last_token() -> None:
    step = make_step([Row(0, 16, 256), Row(0, 16, 256), Row(0, 17, 272), Row(0, 17, 272)])
    assert {common for _, common in step.shared_items()} <= {16, 17}
    check(step)


def test_nested_prompts_share_where_it_saves_most() -> None:
    rows = [*questions(6, 40), *questions(6, 8)]
    step = make_step(rows)
    assert {common for _, common in step.shared_items()} == {40, 8}
    check(step)


def test_many_rows_are_cut_into_items_of_which_each_reads_the_prompt() -> None:
    step = make_step(questions(70, 20), kv_heads=1, heads=3)
    assert len(step.shared_items()) > 1
    assert sum(rows for rows, _ in step.shared_items()) == 70
    check(step)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    step = make_step([*questions(40, 18), *questions(8, 7, prompt=1)])
    assert step.shared_items(threads=threads)
    assert torch.equal(step.run(True, threads=threads), step.run(False, threads=1))


def test_a_row_has_the_same_bits_beside_any_others_that_share_its_prompt() -> None:
    step = make_step([*questions(12, 18), *questions(5, 7)])
    everybody = step.run(True)
    for chosen in ([3], [3, 4, 5], [11, 2, 3, 9], list(range(0, 17, 2))):
        some = attention_cpu.paged_attention(
            step.query[chosen], step.layer, step.packed(True, chosen), step.scale
        )
        assert torch.equal(some, everybody[chosen])


def test_a_row_with_broken_memory_of_its_own_breaks_alone() -> None:
    step = make_step(questions(6, 20))
    block = step.tables[2][20]
    keys_of(step.layer, 64)[block, :, 3, 1] = torch.nan
    values_of(step.layer, 64)[block, :, 1] = torch.inf
    got = step.run(True)
    assert got[2].isnan().all()
    assert got[[0, 1, 3, 4, 5]].isfinite().all()


def test_sharing_can_be_left_out() -> None:
    step = make_step(questions(6, 20))
    packed = step.packed(False)
    shape = attention_cpu_items.Shape(3, 2, 64, 4)
    tables = attention_cpu.flat_tables(packed)
    items, _, _ = attention_cpu_items.plan_items(packed, tables, shape, attention_cpu_items.NO_WINDOW, 1)
    assert (items[:, words.ITEM_TILES] == 1).all()


row = st.builds(
    lambda prompt, shared, own, new: Row(prompt, shared, shared * 16 + own, min(new, shared * 16 + own)),
    st.integers(0, 2),
    st.sampled_from([0, 4, 7, 15, 16, 20, 33]),
    st.integers(1, 300),
    st.sampled_from([1, 1, 1, 1, 2, 30]),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(row, min_size=2, max_size=14),
    shape=st.sampled_from([(6, 2, 16), (2, 2, 32), (9, 3, 64), (8, 1, 48), (7, 1, 16)]),
    window=st.none() | st.integers(1, 700),
    softcap=st.none() | st.floats(0.1, 100),
    half=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_any_step_has_the_bits_of_rows_that_share_nothing(
    rows: list[Row],
    shape: tuple[int, int, int],
    window: int | None,
    softcap: float | None,
    half: bool,
    threads: int,
    seed: int,
) -> None:
    heads, kv_heads, head_dim = shape
    dtype = torch.bfloat16 if half else torch.float32
    step = make_step(rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, seed=seed)
    together = step.run(True, window=window, softcap=softcap, threads=threads)
    assert torch.equal(together, step.run(False, window=window, softcap=softcap, threads=1))
    clean = step.layer.nan_to_num(0.0).float()
    want = torch_attention(
        step.query.float().contiguous(), clean, step.packed(False), step.scale, window=window, softcap=softcap
    )
    torch.testing.assert_close(together.float(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
