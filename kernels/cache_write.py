"""Puts the keys and values of a step's tokens into their blocks.

Layout of one layer of a block: [2, kv_heads, head_dim * 16]; a head's keys are stored [head_dim, 16],
its values [16, head_dim]. See engine/cache/storage.py for why.

A memory of 8 bits (int8, or float8_e4m3fn) has a scale for each token and head beside it, float32 [blocks, 2,
kv_heads, 16] of a layer, keys' first: one for a whole block would change with each token that comes, and
the block with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill.kernels.eight_bits import round_rows

BLOCK_SIZE = 16


def keys_of(layer: Tensor, head_dim: int) -> Tensor:
    """The keys of one layer [blocks, 2, kv_heads, head_dim * 16] as [blocks, kv_heads, head_dim, 16]."""
    return layer[:, 0].view(layer.shape[0], layer.shape[2], head_dim, BLOCK_SIZE)


def values_of(layer: Tensor, head_dim: int) -> Tensor:
    """The values of one layer as [blocks, kv_heads, 16, head_dim]."""
    return layer[:, 1].view(layer.shape[0], layer.shape[2], BLOCK_SIZE, head_dim)


def write_kv(layer: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Writes keys and values [tokens, kv_heads, head_dim] at (block, offset) of each token, int64 [tokens].

    No two tokens of a step may share a place.
    """
    head_dim = keys.shape[-1]
    keys_of(layer, head_dim)[blocks, :, :, offsets] = keys
    values_of(layer, head_dim)[blocks, :, offsets] = values


def write_scaled_kv(
    layer: Tensor, scales: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, offsets: Tensor
) -> None:
    """write_kv into a layer of 8 bits and its scales [blocks, 2, kv_heads, 16].

    What is not finite reads back as NaN, all of its token's head and nothing else.
    """
    rounded_keys, key_scales = round_rows(keys, layer.dtype)
    rounded_values, value_scales = round_rows(values, layer.dtype)
    write_kv(layer, rounded_keys, rounded_values, blocks, offsets)
    scales[:, 0][blocks, :, offsets] = key_scales
    scales[:, 1][blocks, :, offsets] = value_scales


def read_scaled_keys(layer: Tensor, scales: Tensor, head_dim: int) -> Tensor:
    """keys_of a layer of 8 bits, float32 [blocks, kv_heads, head_dim, 16]."""
    return keys_of(layer, head_dim).float() * scales[:, 0, :, None, :]


def read_scaled_values(layer: Tensor, scales: Tensor, head_dim: int) -> Tensor:
    """values_of a layer of 8 bits, float32 [blocks, kv_heads, 16, head_dim]."""
    return values_of(layer, head_dim).float() * scales[:, 1, :, :, None]


def read_scaled(layer: Tensor, scales: Tensor, head_dim: int) -> Tensor:
    """A layer of 8 bits as one of float32, laid out as it is."""
    keys, values = read_scaled_keys(layer, scales, head_dim), read_scaled_values(layer, scales, head_dim)
    return torch.stack([keys.flatten(2), values.flatten(2)], 1)


def clear_blocks(storage: Tensor, blocks: Tensor) -> None:
    """Zeroes blocks [n] of a whole storage [blocks, layers, 2, kv_heads, head_dim * 16].

    A block is cleared when its first token is about to be written. Attention reads whole blocks and gives the
    places behind a row's end no weight, but 0 * NaN is NaN: without this a block that once belonged to a
    row with broken numbers would break the next row that gets it.
    """
    # torch fills no 8-bit floats; zero has the same bits in every dtype.
    bits = storage.view(torch.uint8) if storage.element_size() == 1 else storage
    bits.index_fill_(0, blocks, 0)
