"""Dense layers with the weight laid out once for the device.

On CPU a plain F.linear repacks the weight at every call; oneDNN's packed form does it once. Measured on 2
cores of an EPYC 7003 (AVX2, float32, SmolLM2-135M's shapes), packed against plain: 1.4-3.0x at 8 rows,
1.1-1.5x at 64, 0.9-1.1x at 256-512, and 0.7-2.1x at 1. It has a second use here: the packed form gives a
row the same bits whatever the number of rows beside it, where plain F.linear sums in another order below
4 rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """y = x W^T + b for x [tokens, in]; weight [out, in], bias [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.packed = can_pack(weight)
        # The number of rows is a hint for choosing a layout; any number may follow.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 64) if self.packed else weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN takes this weight: float32 on any CPU, bfloat16 where the CPU multiplies it."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.float32:
        return True
    return weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
