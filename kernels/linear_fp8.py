"""Dense layers in 8-bit floats (e4m3): half the memory of bfloat16, and on Hopper and later twice its peak.

Weights have one scale an output channel, activations one scale a token, taken from that token alone when it
comes: what stands in one row changes no other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagemill.kernels.eight_bits import round_rows

# The first cards that multiply 8-bit floats.
LEAST_CAPABILITY = (8, 9)
FP8 = torch.float8_e4m3fn


class Fp8Linear:
    """y = x W^T + b for x [tokens, in]; weight [out, in], bias [out] or None, any float dtype.

    A row of x that holds a NaN or an infinity gives a row of NaN. On CPU there is a plain form to compare
    with. Raises RuntimeError on a card that cannot multiply such numbers.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.values, self.scales = round_rows(weight, FP8)
        self.bias = self.scales.new_zeros(self.out_features) if bias is None else bias.float()
        self._fast = _compiled(self) if weight.device.type == "cuda" else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._fast is not None:
            return self._fast(x)
        values, scales = round_rows(x, FP8)
        out = values.float() @ self.values.float().T * scales[:, None] * self.scales
        return (out + self.bias).to(x.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the layer's output for x to `residual` [tokens, out] in place."""
        residual.add_(self(x))

    @staticmethod
    def gated(gate: Tensor, up: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """See linear.MakeDense: there is no such pass."""
        return None


def _compiled(layer: Fp8Linear) -> Callable[[Tensor], Tensor]:
    device = layer.values.device
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        needed = ".".join(map(str, LEAST_CAPABILITY))
        raise RuntimeError(
            f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]} and cannot "
            f"multiply 8-bit floats, which needs {needed}: use int8 or bfloat16."
        )
    from pagemill.kernels import linear_triton

    return linear_triton.Layer(layer.values, layer.scales, layer.bias, block=1)
