"""Root-mean-square normalisation (Zhang & Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill.kernels import small_cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; weight [width], or one for each vector of a token.

    The mean is taken in float32. A weight in x's dtype multiplies the value rounded to it, a weight in
    float32 the value before it is rounded: Llama's and Gemma's order in transformers, and in bfloat16
    another order gives other tokens.
    """
    if x.dim() == 2 and small_cpu.serves(x):
        return small_cpu.rms_norm(x, weight, eps)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    return scaled.to(weight.dtype).mul_(weight).to(x.dtype)
