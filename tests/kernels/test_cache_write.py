"""Where keys and values go, and what a cleared block holds."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels.cache_write import (
    BLOCK_SIZE,
    clear_blocks,
    keys_of,
    read_scaled_keys,
    read_scaled_values,
    values_of,
    write_kv,
    write_scaled_kv,
)

BLOCKS, LAYERS, HEADS, DIM = 6, 3, 2, 8


def storage() -> torch.Tensor:
    return torch.full((BLOCKS, LAYERS, 2, HEADS, DIM * BLOCK_SIZE), torch.nan)


def test_keys_lie_transposed_and_values_straight() -> None:
    memory = storage()
    layer = memory[:, 1]
    keys, values = torch.randn(2, HEADS, DIM), torch.randn(2, HEADS, DIM)
    write_kv(layer, keys, values, torch.tensor([4, 0]), torch.tensor([3, 15]))
    for token, (block, offset) in enumerate([(4, 3), (0, 15)]):
        for head in range(HEADS):
            flat_keys, flat_values = layer[block, 0, head], layer[block, 1, head]
            assert torch.equal(flat_keys[offset::BLOCK_SIZE], keys[token, head])
            assert torch.equal(flat_values[offset * DIM : (offset + 1) * DIM], values[token, head])


def test_nothing_else_is_written() -> None:
    memory = storage()
    write_kv(
        memory[:, 2],
        torch.ones(1, HEADS, DIM),
        torch.ones(1, HEADS, DIM),
        torch.tensor([5]),
        torch.tensor([7]),
    )
    assert int(memory.isfinite().sum()) == 2 * HEADS * DIM
    assert memory[:, [0, 1]].isnan().all()


def test_views_share_the_memory() -> None:
    memory = storage()
    layer = memory[:, 0]
    keys_of(layer, DIM)[1, 0, 2, 3] = 7.0
    values_of(layer, DIM)[1, 1, 3, 2] = 8.0
    assert layer[1, 0, 0, 2 * BLOCK_SIZE + 3] == 7.0
    assert layer[1, 1, 1, 3 * DIM + 2] == 8.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_a_cleared_block_is_zero_in_every_layer(dtype: torch.dtype) -> None:
    memory = torch.ones_like(storage()).to(dtype)
    clear_blocks(memory, torch.tensor([1, 3]))
    memory = memory.float()
    assert (memory[[1, 3]] == 0).all()
    assert (memory[[0, 2, 4, 5]] == 1).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_eight_bits_read_back_what_was_written_to_half_a_step(dtype: torch.dtype) -> None:
    layer = torch.zeros(4, 2, 3, 64 * 16).to(dtype)
    scales = torch.zeros(4, 2, 3, 16)
    keys, values = torch.randn(5, 3, 64), torch.randn(5, 3, 64) * 1e3
    keys[2, 1], values[3, 0, 7] = 0, torch.inf
    blocks, offsets = torch.tensor([2, 2, 0, 3, 3]), torch.tensor([14, 15, 0, 0, 1])
    write_scaled_kv(layer, scales, keys, values, blocks, offsets)
    read_keys = read_scaled_keys(layer, scales, 64)[blocks, :, :, offsets]
    read_values = read_scaled_values(layer, scales, 64)[blocks, :, offsets]
    # int8: half a step of 1/127. fp8: 2^-4 of the number itself, half a step of 2^-9 * 1/448 near 0.
    step = 0.5 / 127 if dtype is torch.int8 else 2.0**-4
    assert ((read_keys - keys).abs() <= step * 1.001 * keys.abs().amax(-1, keepdim=True)).all()
    assert read_values[3, 0].isnan().all()
    read_values[3, 0] = values[3, 0] = 0
    assert ((read_values - values).abs() <= step * 1.001 * values.abs().amax(-1, keepdim=True)).all()
    # Nothing else was touched.
    assert int((scales != 0).sum()) == 2 * 5 * 3 - 1
