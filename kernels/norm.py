"""Root-mean-square normalisation, alone and with the residual sum in front of it (Zhang & Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill.kernels import small_cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; x [tokens, width], weight [width], x's dtype.

    The mean is taken in float32 and the scaled value rounded to x's dtype before the weight, as
    transformers does: in bfloat16 another order gives other tokens.
    """
    if x.dim() == 2 and small_cpu.serves(x):
        return small_cpu.rms_norm(x, weight, eps)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    return scaled.to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place and returns the norm of the sum."""
    return rms_norm(residual.add_(x), weight, eps)
