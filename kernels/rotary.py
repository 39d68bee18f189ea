"""Rotary position embedding in the half-split form (Su et al., 2021; the pairing of GPT-NeoX)."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_angles(positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, 1, rotated / 2] of each position.

    Computed in float32 for the tokens of this step rather than looked up: a table over a long context
    costs more memory than these few products cost time, and the bits are the same.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies
    return angles.cos().to(dtype).unsqueeze(1), angles.sin().to(dtype).unsqueeze(1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [tokens, heads, head_dim]: dimension i pairs with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = first.shape[-1]
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half:])
    return out
