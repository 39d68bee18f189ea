"""Rotary position embedding in the half-split form (Su et al., 2021; the pairing of GPT-NeoX)."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_angles(
    positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, 1, rotated / 2] of each position, times `factor`.

    inverse_frequencies: [rotated / 2], or one row of them for each token. Computed in float32 for the
    tokens of this step rather than looked up: a table over a long context costs more memory than these few
    products cost time, and the bits are the same.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos.mul_(factor), sin.mul_(factor)
    return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [tokens, heads, head_dim]: of the rotated dimensions i pairs with i + rotated / 2.

    Dimensions beyond the rotated ones are passed on.
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half : 2 * half])
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
