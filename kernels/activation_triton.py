"""Launches gated activations in Triton, for activation.py; not to be imported where triton may be missing."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pagemill.kernels.activation_triton_kernel import gate_kernel
from pagemill.kernels.variants import FP_FUSION, Variant

# Eight numbers a lane of four warps: one load of 16 bytes in 16 bits.
BLOCK, NUM_WARPS = 1024, 4


def gate(gate_up: Tensor, *, gelu: bool) -> Tensor:
    """activation.silu_mul, or gelu_tanh_mul; the numbers of a row lie together."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        gate_kernel[(tokens, triton.cdiv(width, BLOCK))](
            gate_up,
            out,
            gate_up.stride(0),
            width,
            GELU=gelu,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            num_stages=1,
            enable_fp_fusion=FP_FUSION,
        )
    return out


def variants() -> list[Variant]:
    """Both functions; the width is no part of what is compiled."""
    return [
        Variant(
            gate_kernel,
            f"{dtype}-{'gelu' if gelu else 'silu'}",
            {"gate_up": f"*{dtype}:16", "out": f"*{dtype}:16", "stride": "i32:16", "width": "i32:16"},
            {"GELU": gelu, "BLOCK": BLOCK},
            NUM_WARPS,
            1,
        )
        for dtype in ("bf16", "fp16", "fp32")
        for gelu in (False, True)
    ]
