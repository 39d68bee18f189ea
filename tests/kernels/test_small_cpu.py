"""Compiled small operations against their torch forms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagemill.kernels import small_cpu
from pagemill.kernels.cache_write import write_kv
from pagemill.kernels.norm import rms_norm_torch
from pagemill.kernels.rope_write import rope_write
from pagemill.kernels.rotary import apply_rope, rope_angles


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [0, 1, 3, 50])
@pytest.mark.parametrize("width", [16, 64, 576])
def test_rms_norm_is_its_formula(rows: int, width: int) -> None:
    x, weight = torch.randn(rows, width), torch.randn(width)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(small_cpu.rms_norm(x, weight, 1e-5).double(), expected, rtol=1e-6, atol=1e-6)


def test_rms_norm_of_a_row_has_the_same_bits_beside_any_rows() -> None:
    x, weight = torch.randn(37, 96), torch.randn(96)
    together = small_cpu.rms_norm(x, weight, 1e-6)
    for begin, end in [(0, 1), (5, 8), (30, 37)]:
        assert torch.equal(small_cpu.rms_norm(x[begin:end], weight, 1e-6), together[begin:end])


@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_in_bfloat16_rounds_where_torch_rounds(rows: int, weight_dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 576).bfloat16(), torch.randn(576).to(weight_dtype)
    got = small_cpu.rms_norm(x, weight, 1e-5)
    expected = rms_norm_torch(x, weight, 1e-5)
    assert got.dtype == torch.bfloat16
    # The mean is summed in another order: now and then a number falls to the other side, by one place.
    assert (got != expected).sum() <= rows * 576 // 200
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_write_is_rope_and_then_write(head_dim: int, dtype: torch.dtype) -> None:
    tokens, num_heads, kv_heads = 40, 6, 2
    positions = torch.arange(100, 100 + tokens)
    angles = rope_angles(positions, torch.rand(head_dim // 2), dtype)
    heads = torch.randn(tokens, num_heads + 2 * kv_heads, head_dim).to(dtype)
    assert small_cpu.turns(heads, angles[0])
    places = torch.randperm(tokens * 2)[:tokens]
    blocks, offsets = places // 16, places % 16
    storage = torch.zeros(6, 3, 2, kv_heads, head_dim * 16, dtype=dtype)
    expected = storage.clone()
    rotated = apply_rope(heads[:, : num_heads + kv_heads], *angles)
    write_kv(expected[:, 1], rotated[:, num_heads:], heads[:, num_heads + kv_heads :], blocks, offsets)
    query = rope_write(heads, num_heads, angles, storage[:, 1], blocks, offsets)
    assert torch.equal(query, rotated[:, :num_heads])
    assert torch.equal(storage, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.bfloat16])
def test_heads_are_normed_before_they_turn(dtype: torch.dtype, norm_dtype: torch.dtype) -> None:
    tokens, num_heads, kv_heads, head_dim = 9, 4, 2, 64
    angles = rope_angles(torch.arange(tokens), torch.rand(head_dim // 2), dtype)
    heads = torch.randn(tokens, num_heads + 2 * kv_heads, head_dim).to(dtype)
    norm = torch.randn(num_heads + kv_heads, head_dim).to(norm_dtype)
    storage = torch.zeros(1, 2, kv_heads, head_dim * 16, dtype=dtype)
    expected = storage.clone()
    blocks, offsets = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens)
    normed = rms_norm_torch(heads[:, : num_heads + kv_heads], norm, 1e-6)
    rotated = apply_rope(normed, *angles)
    write_kv(expected, rotated[:, num_heads:], heads[:, num_heads + kv_heads :], blocks, offsets)
    query = rope_write(heads, num_heads, angles, storage, blocks, offsets, norm=norm, eps=1e-6)
    # A few numbers fall to the other side of a border between two of bfloat16.
    near = {"rtol": 2**-6, "atol": 2**-6} if torch.bfloat16 in (dtype, norm_dtype) else {}
    torch.testing.assert_close(query, rotated[:, :num_heads], **near)
    torch.testing.assert_close(storage, expected, **near)
