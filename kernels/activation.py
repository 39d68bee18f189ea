"""Gated activations of the feed-forward part."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pagemill.kernels.choice import takes_triton


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [tokens, 2 * width], gate first; returns [tokens, width]."""
    if takes_triton(gate_up):
        from pagemill.kernels import activation_triton

        return activation_triton.gate(gate_up, gelu=False)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up in the tanh approximation, otherwise as `silu_mul`."""
    if takes_triton(gate_up):
        from pagemill.kernels import activation_triton

        return activation_triton.gate(gate_up, gelu=True)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
