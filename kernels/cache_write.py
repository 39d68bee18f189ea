"""Puts the keys and values of a step's tokens into their blocks.

Layout of one layer of a block: [2, kv_heads, head_dim * 16]; a head's keys are stored [head_dim, 16],
its values [16, head_dim]. See engine/cache/storage.py for why.
"""

from __future__ import annotations

from torch import Tensor

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


def clear_blocks(storage: Tensor, blocks: Tensor) -> None:
    """Zeroes blocks [n] of a whole storage [blocks, layers, 2, kv_heads, head_dim * 16].

    A block is cleared when its first token is about to be written. Attention reads whole blocks and gives the
    places behind a row's end no weight, but 0 * NaN is NaN: without this a block that once belonged to a
    row with broken numbers would break the next row that gets it.
    """
    storage.index_fill_(0, blocks, 0)
