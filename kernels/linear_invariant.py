"""Dense layers on a card whose rows have the same bits whatever rows, and how many, are beside.

The library's products choose how to sum by the number of rows. These do not, and therefore read a weight with
tiles that suit no number of rows best: expect the speed of the library at some hundred rows at best, and half
of it at few and at very many; that is not measured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FixedTileLinear:
    """y = x W^T + b for x [tokens, in] in the weight's dtype; weight [out, in], bias [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.dtype not in DTYPES:
            raise ValueError(f"there is no such layer in {weight.dtype}")
        self.weight, self.bias = weight.contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        # Here and not above: builds of torch for CPU bring no Triton.
        from pagemill.kernels import linear_invariant_triton

        return linear_invariant_triton.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the layer's output for x to `residual` [tokens, out] in place."""
        residual.add_(self(x))

    @staticmethod
    def gated(gate: Tensor, up: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """See linear.MakeDense: there is no such pass."""
        return None
