"""Attention in torch against its reference, and what must hold of it whatever the batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagemill.kernels import attention_torch
from pagemill.kernels.attention import plan_rows
from pagemill.kernels.attention_torch import paged_attention, reference_attention
from pagemill.kernels.cache_write import BLOCK_SIZE

LAYERS, LAYER = 3, 1


@dataclass
class Case:
    query: Tensor
    layer: Tensor
    query_lengths: list[int]
    lengths: list[int]
    tables: list[list[int]]

    def run(self) -> Tensor:
        rows = plan_rows(self.query_lengths, self.lengths, self.tables, self.layer)
        return paged_attention(self.query, self.layer, rows, self.scale)

    def reference(self) -> Tensor:
        rows = plan_rows(self.query_lengths, self.lengths, self.tables, self.layer)
        return reference_attention(self.query, self.layer, rows, self.scale)

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    def alone(self, row: int) -> Case:
        """The same row without its neighbours."""
        start = sum(self.query_lengths[:row])
        stop = start + self.query_lengths[row]
        return Case(
            self.query[start:stop],
            self.layer,
            [self.query_lengths[row]],
            [self.lengths[row]],
            [self.tables[row]],
        )


def make_case(
    spans: list[tuple[int, int]],
    *,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Rows of (new tokens, length) over shuffled blocks; every block that no row owns is full of NaN."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-length // BLOCK_SIZE) for _, length in spans]
    num_blocks = sum(counts) + 5
    free = iter(torch.randperm(num_blocks, generator=random).tolist())
    tables = [list(itertools.islice(free, count)) for count in counts]
    shape = (num_blocks, LAYERS, 2, kv_heads, head_dim * BLOCK_SIZE)
    storage = torch.randn(shape, generator=random).to(dtype)
    storage[list(free)] = torch.nan
    storage[:, [i for i in range(LAYERS) if i != LAYER]] = torch.nan
    tokens = sum(new for new, _ in spans)
    query = torch.randn(tokens, kv_heads * group, head_dim, generator=random).to(dtype)
    return Case(query, storage[:, LAYER], [new for new, _ in spans], [length for _, length in spans], tables)


MIXED = [(1, 1), (1, 15), (1, 16), (1, 17), (5, 5), (3, 40), (1, 33), (16, 32), (17, 17), (2, 2), (1, 100)]


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_a_mixed_step_equals_the_reference(group: int, head_dim: int) -> None:
    case = make_case([(1, 1), (1, 17), (4, 20), (3, 3)], group=group, head_dim=head_dim)
    torch.testing.assert_close(case.run(), case.reference(), rtol=1e-5, atol=1e-5)


def test_lengths_around_block_borders_equal_the_reference() -> None:
    case = make_case(MIXED)
    torch.testing.assert_close(case.run(), case.reference(), rtol=1e-5, atol=1e-5)


def test_bfloat16_stays_within_its_precision() -> None:
    case = make_case(MIXED, dtype=torch.bfloat16)
    torch.testing.assert_close(case.run(), case.reference(), rtol=2e-2, atol=2e-2)


@settings(max_examples=15)
@given(
    spans=st.lists(
        st.integers(1, 40).flatmap(
            lambda n: st.tuples(st.sampled_from(sorted({1, min(n, 3), n})), st.just(n))
        ),
        min_size=1,
        max_size=4,
    ),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_any_step_equals_the_reference(
    spans: list[tuple[int, int]], kv_heads: int, group: int, seed: int
) -> None:
    case = make_case(spans, kv_heads=kv_heads, group=group, head_dim=8, seed=seed)
    torch.testing.assert_close(case.run(), case.reference(), rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_with_and_without_neighbours() -> None:
    case = make_case(MIXED, kv_heads=3, head_dim=64)
    together = case.run()
    start = 0
    for row, new in enumerate(case.query_lengths):
        assert torch.equal(case.alone(row).run(), together[start : start + new]), f"row {row}"
        start += new


def test_decode_rows_in_many_groups_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_torch, "GROUP_BYTES", 1)
    case = make_case([(1, n) for n in (3, 50, 16, 17, 31)])
    torch.testing.assert_close(case.run(), case.reference(), rtol=1e-5, atol=1e-5)


def test_a_broken_row_breaks_itself_alone() -> None:
    case = make_case([(1, 20), (1, 30), (4, 24)])
    before = case.run()
    case.layer[case.tables[1][0]] = torch.nan
    after = case.run()
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 2, 3, 4, 5]], before[[0, 2, 3, 4, 5]])


def test_large_scores_do_not_overflow() -> None:
    case = make_case([(1, 20), (6, 20)])
    case.query *= 1e4
    assert case.run().isfinite().all()
    torch.testing.assert_close(case.run(), case.reference(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("new", "length", "blocks"),
    [(0, 5, 1), (6, 5, 1), (1, 17, 1), (1, 1, 0)],
    ids=["no tokens", "more tokens than keys", "too few blocks", "no memory at all"],
)
def test_an_impossible_state_raises(new: int, length: int, blocks: int) -> None:
    layer = torch.zeros(4, 2, 1, 8 * BLOCK_SIZE)
    with pytest.raises(ValueError, match="row 0"):
        plan_rows([new], [length], [list(range(blocks))], layer)
