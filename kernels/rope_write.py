"""Rotates queries and keys and puts keys and values into their blocks, in one pass where that is compiled."""

from __future__ import annotations

from torch import Tensor

from pagemill.kernels import small_cpu
from pagemill.kernels.cache_write import write_kv
from pagemill.kernels.rotary import apply_rope


def rope_write(
    heads: Tensor,
    num_heads: int,
    angles: tuple[Tensor, Tensor],
    layer: Tensor,
    blocks: Tensor,
    offsets: Tensor,
) -> Tensor:
    """heads [tokens, query + key + value heads, head_dim], as projected; they are used up.

    angles: of rope_angles. layer, blocks, offsets: as for write_kv. Returns the rotated queries
    [tokens, num_heads, head_dim], which may be a view.
    """
    whole = 2 * angles[0].shape[-1] == heads.shape[-1]
    if whole and small_cpu.serves(heads) and layer.dtype == heads.dtype:
        small_cpu.rope_write(heads, num_heads, *angles, layer, blocks, offsets)
        return heads[:, :num_heads]
    kv_heads = layer.shape[2]
    rotated = apply_rope(heads[:, : num_heads + kv_heads], *angles)
    write_kv(layer, rotated[:, num_heads:], heads[:, num_heads + kv_heads :], blocks, offsets)
    return rotated[:, :num_heads]
