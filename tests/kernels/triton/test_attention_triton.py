"""Attention in Triton against attention in torch, where they could differ: at the borders of blocks, tiles,
splits and windows, over memory that is NaN wherever no row has a token, into outputs that are NaN before."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from paged_step import Row, Step, make_step
from torch import Tensor

from pagemill.kernels import attention_triton
from pagemill.kernels.attention_triton import (
    DevicePlan,
    paged_attention,
    plan_rows,
    plan_to_words,
    plan_words,
)
from pagemill.kernels.attention_triton_plan import SPLIT, Sizes
from pagemill.kernels.cache_write import keys_of, values_of
from pagemill.kernels.packed_rows import PackedRows

pytestmark = pytest.mark.usefixtures("poisoned")

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}
DTYPES = [torch.float32, torch.float16]


def run(step: Step, device: torch.device, share: bool = True, **options: Any) -> Tensor:
    query, layer = step.query.to(device), step.layer.to(device)
    return paged_attention(query, layer, step.packed(share), step.scale, **options).cpu()


def check(step: Step, device: torch.device, **options: Any) -> None:
    tolerance = TOLERANCE[step.query.dtype]
    found = run(step, device, **options)
    assert found.dtype == step.query.dtype
    torch.testing.assert_close(found.float(), step.expected(**options), rtol=tolerance, atol=tolerance)


def shared_rows(step: Step, group: int, **options: Any) -> int:
    """The most rows that one item of the step has."""
    plan = plan_rows(step.packed(), group, step.query.shape[2], step.query.element_size(), **options)
    return int(max(items[:, 1].max(initial=0) for items in (plan.small_items, plan.large_items)))


def test_a_step_without_rows_gives_nothing(device: torch.device) -> None:
    layer = torch.zeros(2, 2, 1, 256, device=device)
    got = paged_attention(torch.zeros(0, 2, 16, device=device), layer, PackedRows([], [], []), 1.0)
    assert got.shape == (0, 2, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    check(make_step([Row(1), Row(300), Row(20, new=4)], head_dim=head_dim, dtype=dtype), device)


@pytest.mark.parametrize("group", range(1, 9))
def test_groups_of_query_heads(device: torch.device, group: int) -> None:
    step = make_step([Row(40), Row(270), Row(33, new=20)], group=group, kv_heads=2, dtype=torch.float16)
    check(step, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_over_any_number_of_keys(device: torch.device, dtype: torch.dtype) -> None:
    lengths = (1, 2, 15, 16, 17, 31, 63, 64, 65, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, 3 * SPLIT + 7)
    check(make_step([Row(length) for length in lengths], dtype=dtype), device)


def test_more_parts_than_are_combined_at_once(device: torch.device) -> None:
    check(make_step([Row(17 * SPLIT + 5)], group=1, dtype=torch.float16), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("new", "length"), [(2, 2), (16, 16), (17, 33), (64, 64), (65, 65), (64, 128), (130, 200), (3, 260)]
)
def test_runs_of_tokens(device: torch.device, new: int, length: int, dtype: torch.dtype) -> None:
    check(make_step([Row(length, new=new)], dtype=dtype), device)


MIXED = [Row(1), Row(17), Row(5, new=5), Row(300), Row(150, new=70), Row(40, new=2), Row(520), Row(64)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 16, 63, 64, 100, 300, 10_000])
def test_windows(device: torch.device, window: int, dtype: torch.dtype) -> None:
    check(make_step(MIXED, dtype=dtype), device, window=window)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("window", [None, 70])
def test_softcaps(device: torch.device, softcap: float, window: int | None) -> None:
    step = make_step(MIXED)
    step.query *= 10
    # A cap times the rounding of a hyperbolic tangent.
    tolerance = 3e-6 + 5e-7 * softcap
    found, expected = (f(softcap=softcap, window=window) for f in (partial(run, step, device), step.expected))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_softcap_takes_scores_of_any_size(device: torch.device) -> None:
    step = make_step([Row(70), Row(40, new=5)])
    step.query *= 1e5
    check(step, device, softcap=3.0)


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    step = make_step([Row(300), Row(40, new=20)])
    step.query *= 1e4
    assert run(step, device).isfinite().all()


def test_fresh_numbers_each_time(device: torch.device) -> None:
    seed = int(torch.seed()) % 2**31
    print(f"seed {seed}")
    check(make_step(MIXED, kv_heads=2, group=3, dtype=torch.float16, seed=seed), device)


@pytest.mark.parametrize("window", [None, 100])
def test_a_row_has_the_same_bits_beside_any_others(device: torch.device, window: int | None) -> None:
    step = make_step(MIXED, group=3, dtype=torch.float16)
    together, starts = run(step, device, window=window), step.starts()
    for row in range(len(MIXED)):
        alone = run(step.only([row]), device, window=window)
        assert torch.equal(alone, together[starts[row] : starts[row + 1]])


def test_a_broken_row_breaks_alone(device: torch.device) -> None:
    step = make_step([Row(20), Row(30), Row(24, new=4), Row(600), Row(600)], head_dim=16)
    before = run(step, device)
    keys_of(step.layer, 16)[step.tables[1][0], :, 3, 1] = torch.nan
    values_of(step.layer, 16)[step.tables[3][20], :, 2] = torch.nan
    after = run(step, device)
    assert after[[1, 6]].isnan().all()
    assert torch.equal(after[[0, 2, 3, 4, 5, 7]], before[[0, 2, 3, 4, 5, 7]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [16, 17, 40])
def test_a_common_prefix_read_once(device: torch.device, shared: int, dtype: torch.dtype) -> None:
    rows = [Row(shared * 16 + own, shared=shared) for own in (1, 5, 16, 60, 300)]
    step = make_step([*rows, Row(30, prompt=1)], dtype=dtype)
    assert shared_rows(step, 2, window=None) == 5
    check(step, device)
    apart, tolerance = run(step, device, share=False), TOLERANCE[dtype]
    torch.testing.assert_close(run(step, device), apart, rtol=tolerance, atol=tolerance)


def test_two_prompts_beside_runs_of_tokens_and_rows_alone(device: torch.device) -> None:
    rows = [Row(600 + i, shared=32) for i in range(6)] + [Row(300 + i, shared=17, prompt=1) for i in range(3)]
    rows[2:2] = [Row(610, new=50, shared=32), Row(270, prompt=2), Row(9, new=3, prompt=3)]
    step = make_step(rows, kv_heads=2, group=4, dtype=torch.float16)
    assert shared_rows(step, 4, window=None) == 6
    check(step, device)


@pytest.mark.parametrize("window", [64, 300, 350])
def test_a_window_hides_part_of_a_common_prefix(device: torch.device, window: int) -> None:
    step = make_step([Row(512 + own, shared=32) for own in (1, 5, 40, 60)], dtype=torch.float16)
    assert shared_rows(step, 2, window=window) == 4
    check(step, device, window=window, softcap=20.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_memory_of_8_bits_with_a_scale_a_token(
    device: torch.device, stored: torch.dtype, dtype: torch.dtype
) -> None:
    step = make_step(MIXED, kv_heads=2, dtype=dtype)
    most = 127 if stored == torch.int8 else 448
    wide = step.layer.float()
    keys, values = keys_of(wide, 16), values_of(wide, 16)
    scales = torch.stack([keys.abs().amax(2), values.abs().amax(3)], 1) / most
    small = torch.empty_like(wide)
    keys_of(small, 16)[:] = keys / scales[:, 0, :, None]
    values_of(small, 16)[:] = values / scales[:, 1, :, :, None]
    packed = (small.nan_to_num(0).round() if stored == torch.int8 else small).to(stored)
    back = torch.empty_like(wide)
    keys_of(back, 16)[:] = keys_of(packed.float(), 16) * scales[:, 0, :, None]
    values_of(back, 16)[:] = values_of(packed.float(), 16) * scales[:, 1, :, :, None]
    found = run(dataclasses.replace(step, layer=packed), device, scales=scales.to(device))
    expected = dataclasses.replace(step, layer=back).expected()
    torch.testing.assert_close(found.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_plan_larger_than_its_steps_is_filled_again(device: torch.device) -> None:
    """As a captured graph has it: sizes of the largest step, and whatever the one before has left."""
    sizes = Sizes(40, 8, 12, 6, 40, 400)
    words = torch.empty(plan_words(sizes), dtype=torch.int32, device=device)
    plan = DevicePlan(sizes, words)
    for rows in (
        [Row(600 + i, shared=32) for i in range(10)] + [Row(50, new=40, prompt=1)],
        [Row(20), Row(300)],
        MIXED,
    ):
        step = make_step(rows, dtype=torch.float16, group=4)
        words.copy_(torch.from_numpy(plan_to_words(plan_rows(step.packed(), 4, 16, 2, None), sizes)))
        layer = step.layer.to(device)
        found = attention_triton.attend(step.query.to(device), layer, plan, step.scale).cpu()
        torch.testing.assert_close(found.float(), step.expected(), rtol=3e-3, atol=3e-3)


@pytest.mark.usefixtures("rows_one_by_one")
@pytest.mark.parametrize("window", [None, 30])
def test_as_runs_a_token_has_the_same_bits_alone_and_in_any_run(
    device: torch.device, window: int | None
) -> None:
    whole = make_step([Row(300, new=90)], dtype=torch.float32)
    expected = run(whole, device, window=window)
    query, layer, table = whole.query.to(device), whole.layer.to(device), whole.packed().block_tables[0]
    for begin, end in ((0, 1), (89, 90), (17, 60)):
        rows = PackedRows([end - begin], [210 + end], [table], as_runs=True)
        found = paged_attention(query[begin:end], layer, rows, whole.scale, window=window).cpu()
        assert torch.equal(found, expected[begin:end])


def test_a_step_larger_than_its_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        plan = plan_rows(make_step([Row(20), Row(20)]).packed(), 2, 16, 4, None)
        plan_to_words(plan, Sizes(1, 0, 1, 0, 0, 4))


@pytest.mark.parametrize(("head_dim", "group"), [(24, 2), (272, 2), (16, 17)])
def test_a_shape_without_a_kernel_is_refused(device: torch.device, head_dim: int, group: int) -> None:
    step = make_step([Row(5)], head_dim=head_dim, group=group)
    with pytest.raises(ValueError, match="no kernel"):
        run(step, device)


def test_blocks_beyond_the_reach_of_32_bits(device: torch.device) -> None:
    """Blocks at the end of a memory of more than 2**31 numbers, of which the system gives what is touched."""
    head_dim, block = 256, 2 * 256 * 16
    blocks = 2**31 // block + 64
    layer = torch.empty(blocks, 2, 1, head_dim * 16, dtype=torch.int8, device=device)
    scales = torch.empty(blocks, 2, 1, 16, device=device)
    tables = [[blocks - 3, blocks - 7], [blocks - 1]]
    generator = torch.Generator().manual_seed(0)
    for table in tables:
        for place in table:
            layer[place] = torch.randint(-127, 128, layer[0].shape, generator=generator, dtype=torch.int8)
            scales[place] = torch.rand(scales[0].shape, generator=generator) / 100
    used = torch.tensor([place for table in tables for place in table])
    query = torch.randn(6, 1, head_dim, generator=generator)
    rows = PackedRows([1, 5], [30, 9], tables)
    found = paged_attention(query.to(device), layer, rows, 0.1, scales=scales).cpu()
    wide, factor = layer[used].cpu().float(), scales[used].cpu()
    keys_of(wide, head_dim).mul_(factor[:, 0, :, None])
    values_of(wide, head_dim).mul_(factor[:, 1, :, :, None])
    few = Step(query, wide, [Row(30), Row(9, new=5)], [[0, 1], [2]])
    expected = attention_triton.paged_attention(query.to(device), wide.to(device), few.packed(), 0.1).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
