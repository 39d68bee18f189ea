"""Compiled attention against a float64 reference, and the promise that a query's bits are its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagemill.kernels import attention, attention_cpu
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


@dataclass
class Step:
    """Rows over one layer of a larger storage, in blocks that lie apart; NaN wherever no row has a token."""

    query: Tensor
    layer: Tensor
    rows: PackedRows
    scale: float

    def run(self, **options: object) -> Tensor:
        return attention_cpu.paged_attention(self.query, self.layer, self.rows, self.scale, **options)  # type: ignore[arg-type]


def make_step(
    lengths: list[int],
    new: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Step:
    generator = torch.Generator().manual_seed(seed)
    used = [blocks_for(length) for length in lengths]
    order = torch.randperm(sum(used) + 3, generator=generator).tolist()
    storage = torch.full((len(order), 3, 2, kv_heads, head_dim * 16), torch.nan, dtype=dtype)
    layer = storage[:, 1]
    tables = []
    for length, count in zip(lengths, used, strict=True):
        table, order = order[:count], order[count:]
        tables.append(table)
        for i, block in enumerate(table):
            n = min(16, length - 16 * i)
            shape = (kv_heads, head_dim, n)
            keys_of(layer, head_dim)[block, :, :, :n] = torch.randn(shape, generator=generator).to(dtype)
            values = torch.randn(shape, generator=generator).transpose(1, 2)
            values_of(layer, head_dim)[block, :, :n] = values.to(dtype)
    # Queries are a view of something wider, as they are behind the rotary embedding.
    query = torch.randn((sum(new), heads + kv_heads, head_dim), generator=generator).to(dtype)[:, :heads]
    rows = PackedRows(new, lengths, tables)
    return Step(query, layer, rows, head_dim**-0.5)


def check(step: Step, window: int | None = None, softcap: float | None = None) -> None:
    got = step.run(window=window, softcap=softcap)
    want = reference_attention(
        step.query.double(), step.layer, step.rows, step.scale, window=window, softcap=softcap
    )
    assert got.dtype == step.query.dtype
    # A score is exact to a part of its size, and a weight to the absolute error of its score.
    tolerance = TOLERANCE[got.dtype] * max(1.0, step.scale * step.query.shape[2] ** 0.5)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 255, 256, 257, 530])
def test_a_decoded_token_sees_its_whole_row_and_nothing_behind_it(length: int) -> None:
    check(make_step([length], [1]))


@pytest.mark.parametrize(
    ("length", "new"), [(2, 2), (16, 16), (17, 3), (40, 40), (70, 33), (300, 50), (520, 9)]
)
def test_a_prefill_chunk_is_causal(length: int, new: int) -> None:
    check(make_step([length], [new]))


def test_rows_that_decode_and_rows_that_prefill_share_a_step() -> None:
    check(make_step([5, 64, 31, 16, 290, 1, 90], [1, 20, 31, 1, 1, 1, 17]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (9, 3), (4, 1), (7, 1), (16, 2), (12, 1)])
def test_any_number_of_query_heads_may_share_a_kv_head(heads: int, kv_heads: int) -> None:
    check(make_step([37, 21], [1, 18], heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_any_head_dim_that_is_a_multiple_of_16(head_dim: int) -> None:
    check(make_step([37, 21], [1, 18], head_dim=head_dim, heads=2))


@pytest.mark.parametrize("heads", [2, 8])
def test_bfloat16_is_computed_in_float32(heads: int) -> None:
    check(make_step([300, 21], [1, 18], heads=heads, dtype=torch.bfloat16))


@pytest.mark.parametrize("window", [1, 5, 16, 17, 100, 256, 1000])
def test_a_window_hides_older_keys(window: int) -> None:
    check(make_step([300, 5, 90, 280], [1, 1, 40, 30]), window=window)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_a_softcap_bends_scores(softcap: float) -> None:
    step = make_step([300, 40], [1, 17])
    step.scale = 3.0  # scores far over the smaller cap and far under the larger one
    check(step, softcap=softcap)
    check(step, softcap=softcap, window=20)


def test_large_scores_neither_overflow_nor_lose_the_softmax() -> None:
    step = make_step([300], [40])
    step.scale = 40.0
    check(step)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 600), st.integers(1, 70)).map(lambda r: (r[0], min(r))),
        min_size=1,
        max_size=4,
    ),
    shape=st.sampled_from([(6, 2, 16), (2, 2, 32), (9, 3, 64), (8, 1, 48)]),
    window=st.none() | st.integers(1, 400),
    softcap=st.none() | st.floats(0.1, 100),
    half=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_step_agrees_with_the_form_in_torch(
    rows: list[tuple[int, int]],
    shape: tuple[int, int, int],
    window: int | None,
    softcap: float | None,
    half: bool,
    seed: int,
) -> None:
    heads, kv_heads, head_dim = shape
    lengths, new = [length for length, _ in rows], [n for _, n in rows]
    dtype = torch.bfloat16 if half else torch.float32
    step = make_step(lengths, new, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, seed=seed)
    got = step.run(window=window, softcap=softcap)
    clean = step.layer.nan_to_num(0.0).float()
    want = torch_attention(
        step.query.float().contiguous(), clean, step.rows, step.scale, window=window, softcap=softcap
    )
    torch.testing.assert_close(got.float(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (70, None), (None, 5.0), (300, 5.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(
    dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    length = 600
    step = make_step([length], [length], heads=6, dtype=dtype)
    whole = step.run(window=window, softcap=softcap)
    # Chunks of many sizes, tokens alone among them.
    starts = [0, 1, 2, 18, 50, 51, 200, 255, 256, 257, 330, 598, 599]
    for start, stop in zip(starts, [*starts[1:], length], strict=True):
        rows = PackedRows([stop - start], [stop], step.rows.block_tables)
        part = Step(step.query[start:stop], step.layer, rows, step.scale)
        assert torch.equal(part.run(window=window, softcap=softcap), whole[start:stop])


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 8), (16, 2)])
def test_a_row_has_the_same_bits_in_any_company(heads: int, kv_heads: int) -> None:
    lengths = [7, 300, 31, 90, 17, 260] + [40 + i for i in range(40)]
    new = [1, 1, 31, 40, 1, 1] + [1] * 40
    step = make_step(lengths, new, heads=heads, kv_heads=kv_heads)
    together = step.run()
    token = 0
    for i, count in enumerate(new):
        rows = PackedRows([count], [lengths[i]], [step.rows.block_tables[i]])
        alone = Step(step.query[token : token + count], step.layer, rows, step.scale)
        assert torch.equal(alone.run(), together[token : token + count])
        token += count


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    step = make_step([7, 300, 31, 90, 17], [1, 1, 31, 40, 1], heads=9, kv_heads=3)
    assert torch.equal(step.run(threads=threads), step.run(threads=1))


def test_a_second_call_on_the_same_rows_answers_for_its_own_layer() -> None:
    step = make_step([40, 33], [1, 20])
    first = step.run()
    other = Step(step.query, step.layer * 2, step.rows, step.scale)
    assert not torch.equal(other.run(), first)
    assert torch.equal(step.run(), first)


def test_a_broken_key_breaks_the_queries_that_see_it_and_no_other() -> None:
    step = make_step([40, 40], [40, 1])
    block = step.rows.block_tables[0][1]
    keys_of(step.layer, 64)[block, :, 3, 4] = torch.nan  # position 20 of the first row
    got = step.run()
    assert got[:20].isfinite().all()
    assert got[20:40].isnan().all()
    assert got[40].isfinite().all()


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_form_in_torch_agrees_with_the_reference(window: int | None, softcap: float | None) -> None:
    step = make_step([40, 33, 70, 9], [1, 20, 70, 1])
    layer = step.layer.nan_to_num(0.0)
    got = torch_attention(
        step.query.contiguous(), layer, step.rows, step.scale, window=window, softcap=softcap
    )
    want = reference_attention(
        step.query.double(), layer, step.rows, step.scale, window=window, softcap=softcap
    )
    torch.testing.assert_close(got.double(), want, rtol=4e-6, atol=4e-6)


def test_what_it_cannot_serve_is_named_and_served_by_torch(caplog: pytest.LogCaptureFixture) -> None:
    assert "head_dim 24" in str(attention_cpu.refusal(24, torch.float32))
    assert "float64" in str(attention_cpu.refusal(64, torch.float64))
    step = make_step([20], [3], head_dim=24)
    layer = step.layer.nan_to_num(0.0)
    got = attention.paged_attention(step.query.contiguous(), layer, step.rows, step.scale)
    assert "head_dim 24" in caplog.text
    want = reference_attention(step.query.double(), layer, step.rows, step.scale)
    torch.testing.assert_close(got.double(), want, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("options", [{"window": 0}, {"softcap": 0.0}])
def test_a_window_or_softcap_that_means_nothing_is_refused(options: dict[str, float]) -> None:
    step = make_step([20], [3])
    with pytest.raises(ValueError):
        attention.paged_attention(step.query, step.layer, step.rows, step.scale, **options)  # type: ignore[arg-type]
