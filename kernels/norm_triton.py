"""Launches RMSNorm in Triton, for norm.py; not to be imported where triton may be missing."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pagemill.kernels.norm_triton_kernel import add_rms_norm_kernel, rms_norm_kernel
from pagemill.kernels.variants import FP_FUSION, Variant


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """norm.rms_norm; the last dimension of x [tokens, width] or [tokens, vectors, width] lies together."""
    vectors, width = (1 if x.dim() == 2 else x.shape[1]), x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rms_norm_kernel[(x.shape[0] * vectors,)](
            x,
            weight,
            out,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            vectors,
            weight.stride(0) if weight.dim() == 2 else 0,
            width,
            eps,
            BLOCK=triton.next_power_of_2(width),
            num_warps=num_warps(width),
            num_stages=1,
            enable_fp_fusion=FP_FUSION,
        )
    return out


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, inner_weight: Tensor | None = None
) -> Tensor:
    """norm.add_rms_norm, in one pass over both."""
    rows, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        add_rms_norm_kernel[(rows,)](
            residual,
            x,
            weight if inner_weight is None else inner_weight,
            weight,
            out,
            residual.stride(0),
            x.stride(0),
            width,
            eps,
            INNER=inner_weight is not None,
            BLOCK=triton.next_power_of_2(width),
            num_warps=num_warps(width),
            num_stages=1,
            enable_fp_fusion=FP_FUSION,
        )
    return out


def num_warps(width: int) -> int:
    """So that a lane holds 8 to 32 numbers: loads of 16 bytes, and no spilling at 16,384."""
    return int(min(16, max(1, triton.next_power_of_2(width) // 512)))


def variants() -> list[Variant]:
    """Llama's, Qwen's and Gemma's widths; Gemma norms what is added."""
    found = []
    for name, dtype, weight, width, inner in (
        ("bf16-4096", "bf16", "bf16", 4096, False),
        ("bf16-1024", "bf16", "bf16", 1024, False),
        ("fp16-8192", "fp16", "fp16", 8192, False),
        ("fp32-2048", "fp32", "fp32", 2048, False),
        ("bf16-f32-2304", "bf16", "fp32", 2304, True),
        ("fp32-3584", "fp32", "fp32", 3584, True),
    ):
        found += [_norm(name, dtype, weight, width), _add(name, dtype, weight, width, inner)]
    return found


def _norm(name: str, dtype: str, weight: str, width: int) -> Variant:
    signature = {"x": f"*{dtype}:16", "weight": f"*{weight}:16", "out": f"*{dtype}:16"}
    strides = dict.fromkeys(["token_stride", "vector_stride"], "i32:16")
    signature |= {**strides, "vectors": "i32", "weight_stride": "i32:16", "width": "i32:16", "eps": "fp32"}
    constexprs = {"BLOCK": triton.next_power_of_2(width)}
    return Variant(rms_norm_kernel, name, signature, constexprs, num_warps(width), 1)


def _add(name: str, dtype: str, weight: str, width: int, inner: bool) -> Variant:
    signature = {"residual": f"*{dtype}:16", "x": f"*{dtype}:16"}
    signature |= {"inner_weight": f"*{weight}:16", "weight": f"*{weight}:16", "out": f"*{dtype}:16"}
    signature |= {"residual_stride": "i32:16", "x_stride": "i32:16", "width": "i32:16", "eps": "fp32"}
    constexprs = {"INNER": inner, "BLOCK": triton.next_power_of_2(width)}
    return Variant(add_rms_norm_kernel, name, signature, constexprs, num_warps(width), 1)
