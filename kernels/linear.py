"""Dense layers with the weight laid out once for the device.

On CPU a plain F.linear repacks the weight at every call. The compiled form (linear_cpu.py) serves, and where
nothing can be compiled oneDNN's packed form. Measured on SmolLM2-135M's shapes: bfloat16 on two cores with
AVX-512 286, 402 and 415 GFLOP/s at 8, 64 and 128 rows compiled against 222, 383 and 415 packed; float32 on
one core of an EPYC 7003 (AVX2) compiled against packed 1.15-1.28x at 64 rows, 1.1x at 512, 1.2x at 1 to 8,
packed against plain 1.4-3.0x at 8 rows and 1.1-1.5x at 64. Both give a row the same bits whatever the number
of rows beside it, where plain F.linear sums in another order below 4 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill.kernels import linear_cpu
from pagemill.kernels.activation import gelu_tanh_mul, silu_mul
from pagemill.kernels.choice import takes_compiled
from pagemill.kernels.cpu_threads import why_not_compiled
from pagemill.kernels.linear_cpu_words import PANEL, UNROLL


class Dense(Protocol):
    """A dense layer, however it is computed."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, in] -> [tokens, out]."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the layer's output for x to `residual` [tokens, out] in place."""
        ...


class MakeDense(Protocol):
    """What makes one: the class of a kind of layers."""

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Dense:
        """Of a weight [out, in] and a bias [out]."""
        ...

    def gated(self, gate: Tensor, up: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """silu(x gate^T) * (x up^T) in one pass, bias [2 * out] the gate's first; None where none does."""
        ...


class InvariantLinear:
    """A layer whose rows have the same bits whatever rows, and how many, and how many threads are beside.

    By construction, for any dtype and shape: the sums are those of the compiled form, each row's in chains of
    its own in float32, rounded once, at their end. Weights of float16 are widened, which is exact and costs
    memory. Needs what linear_cpu.py needs (cpu_threads).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.dtype not in linear_cpu.INPUTS_OF_A_LINE:
            weight = weight.float()
        self.out_features, self.in_features = weight.shape
        self._width_padding = -self.in_features % (UNROLL * linear_cpu.INPUTS_OF_A_LINE[weight.dtype])
        padding = -self.out_features % PANEL
        self.plain = not self._width_padding and not padding
        self.panels = linear_cpu.pack(F.pad(weight, (0, self._width_padding, 0, padding)))
        self.bias = None if bias is None else F.pad(bias.float(), (0, padding))

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, in] -> [tokens, out] in x's dtype."""
        if self.plain and x.dtype == self.panels.dtype:
            return linear_cpu.linear(x, self.panels, self.bias)
        padded = F.pad(x.to(self.panels.dtype), (0, self._width_padding))
        return linear_cpu.linear(padded, self.panels, self.bias)[:, : self.out_features].to(x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """The output in float32, as it was summed."""
        if self.plain and x.dtype == self.panels.dtype:
            return linear_cpu.linear(x, self.panels, self.bias, torch.float32)
        return self(x).float()

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the layer's output for x to `residual` [tokens, out] in place."""
        if self.plain and x.dtype == residual.dtype == self.panels.dtype:
            linear_cpu.linear_add(x, self.panels, self.bias, residual)
        else:
            residual.add_(self(x))

    @staticmethod
    def gated(gate: Tensor, up: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """See MakeDense."""
        if linear_cpu.refusal(gate) is not None:
            return None
        return GatedPanels(gate, up, bias)


class GatedPanels:
    """silu(x gate^T) * (x up^T) of two weights whose panels lie in turns; bias [2 * out] the gate's first."""

    def __init__(self, gate: Tensor, up: Tensor, bias: Tensor | None) -> None:
        self.panels = linear_cpu.pack_pair(gate, up)
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = torch.stack([half.float().view(-1, PANEL) for half in bias.chunk(2)], 1)

    def __call__(self, x: Tensor) -> Tensor:
        return linear_cpu.linear_gated(x, self.panels, self.bias)


class Linear:
    """y = x W^T + b for x [tokens, in]; weight [out, in], bias [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.compiled: InvariantLinear | None = None
        self.packed = False
        if _takes_panels(weight):
            self.compiled = InvariantLinear(weight, bias)
            return
        self.packed = can_pack(weight)
        # The number of rows is a hint for choosing a layout; any number may follow.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 64) if self.packed else weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.compiled is not None:
            return self.compiled(x)
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the layer's output for x to `residual` [tokens, out] in place."""
        if self.compiled is not None:
            self.compiled.add_to(residual, x)
        else:
            residual.add_(self(x))

    @staticmethod
    def gated(gate: Tensor, up: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """See MakeDense."""
        return InvariantLinear.gated(gate, up, bias) if _takes_panels(gate) else None


def in_float32(layer: Dense, x: Tensor) -> Tensor:
    """layer(x) in float32, without a rounding on the way where the layer can."""
    found = layer.compiled if isinstance(layer, Linear) else layer
    return found.wide(x) if isinstance(found, InvariantLinear) else layer(x).float()


def _takes_panels(weight: Tensor) -> bool:
    """Whether the compiled form serves a weight, and no library is known to be faster: oneDNN is where a CPU
    multiplies whole tiles of bfloat16 (AMX)."""
    if not takes_compiled(weight) or weight.dtype not in linear_cpu.INPUTS_OF_A_LINE:
        return False
    if weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return False
    return why_not_compiled() is None


ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


class GatedLinear:
    """activation(x G^T + g) * (x U^T + u): a gated feed-forward part's first half; biases [out] or None."""

    def __init__(
        self,
        gate: Tensor,
        up: Tensor,
        gate_bias: Tensor | None = None,
        up_bias: Tensor | None = None,
        *,
        activation: str = "silu",
        make: MakeDense = Linear,
    ) -> None:
        bias = None if gate_bias is None or up_bias is None else torch.cat([gate_bias, up_bias])
        whole = make.gated(gate, up, bias) if activation == "silu" else None
        if whole is None:
            both, activate = make(torch.cat([gate, up]), bias), ACTIVATIONS[activation]
            whole = lambda x: activate(both(x))  # noqa: E731
        self.whole = whole

    def __call__(self, x: Tensor) -> Tensor:
        return self.whole(x)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN takes this weight: float32 on any CPU, bfloat16 where the CPU multiplies it."""
    if not takes_compiled(weight) or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.float32:
        return True
    return weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
