"""Rotates queries and keys and puts keys and values into their blocks, in one pass where that is compiled."""

from __future__ import annotations

from torch import Tensor

from pagemill.kernels import small_cpu
from pagemill.kernels.cache_write import write_kv, write_scaled_kv
from pagemill.kernels.choice import takes_triton
from pagemill.kernels.norm import rms_norm
from pagemill.kernels.rotary import apply_rope


def rope_write(
    heads: Tensor,
    num_heads: int,
    angles: tuple[Tensor, Tensor],
    layer: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    scales: Tensor | None = None,
) -> Tensor:
    """heads [tokens, query + key + value heads, head_dim], as projected; they are used up.

    angles: of rope_angles. layer, blocks, offsets: as for write_kv. norm: weights [query + key heads,
    head_dim] of an RMSNorm over each query and key before it turns, eps its own. scales: of a memory of 8
    bits, as for write_scaled_kv. Returns the rotated queries [tokens, num_heads, head_dim], which may be a
    view.
    """
    if takes_triton(heads):
        from pagemill.kernels import rope_write_triton

        places = (layer, blocks, offsets)
        rope_write_triton.rope_write(heads, num_heads, *angles, *places, norm=norm, eps=eps, scales=scales)
        return heads.narrow(1, 0, num_heads)
    if layer.dtype == heads.dtype and small_cpu.turns(heads, angles[0]):
        small_cpu.rope_write(heads, num_heads, *angles, layer, blocks, offsets, norm, eps)
        return heads[:, :num_heads]
    kv_heads = layer.shape[2]
    turning, values = heads[:, : num_heads + kv_heads], heads[:, num_heads + kv_heads :]
    if norm is not None:
        turning.copy_(rms_norm(turning, norm, eps))
    rotated = apply_rope(turning, *angles)
    if scales is None:
        write_kv(layer, rotated[:, num_heads:], values, blocks, offsets)
    else:
        write_scaled_kv(layer, scales, rotated[:, num_heads:], values, blocks, offsets)
    return rotated[:, :num_heads]
