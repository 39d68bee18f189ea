"""Where keys and values go, and what a cleared block holds."""

from __future__ import annotations

import torch

from pagemill.kernels.cache_write import BLOCK_SIZE, clear_blocks, keys_of, values_of, write_kv

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


def test_a_cleared_block_is_zero_in_every_layer() -> None:
    memory = storage()
    clear_blocks(memory, torch.tensor([1, 3]))
    assert (memory[[1, 3]] == 0).all()
    assert memory[[0, 2, 4, 5]].isnan().all()
