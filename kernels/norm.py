"""Root-mean-square normalisation (Zhang & Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill.kernels import small_cpu
from pagemill.kernels.choice import takes_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; weight [width], or one for each vector of a token.

    The mean is taken in float32. A weight in x's dtype multiplies the value rounded to it, a weight in
    float32 the value before it is rounded: Llama's and Gemma's order in transformers, and in bfloat16
    another order gives other tokens.
    """
    if takes_triton(x):
        from pagemill.kernels import norm_triton

        return norm_triton.rms_norm(x, weight, eps)
    if x.dim() == 2 and weight.dim() == 1 and small_cpu.serves(x):
        return small_cpu.rms_norm(x, weight, eps)
    return rms_norm_torch(x, weight, eps)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The plain form of `rms_norm`."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    return scaled.to(weight.dtype).mul_(weight).to(x.dtype)


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, inner_weight: Tensor | None = None
) -> Tensor:
    """Adds x [tokens, width] to `residual` in place, and returns the norm of the sum.

    inner_weight: that of a norm which x goes through before it is added (Gemma); None for none. Both weights
    have one dtype, and the order of rounding is that of `rms_norm`.
    """
    if takes_triton(x):
        from pagemill.kernels import norm_triton

        return norm_triton.add_rms_norm(residual, x, weight, eps, inner_weight)
    residual.add_(x if inner_weight is None else rms_norm(x, inner_weight, eps))
    return rms_norm(residual, weight, eps)
