"""Launches rope_write in Triton, for rope_write.py; not to be imported where triton may be missing."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pagemill.kernels.eight_bits import LARGEST, SMALLEST_ROW
from pagemill.kernels.rope_write_triton_kernel import rope_write_kernel
from pagemill.kernels.variants import FP_FUSION, Variant

# A whole block of memory where a prompt is written; in a decode step each token has a block of its own.
TOKENS = 16


def rope_write(
    heads: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    layer: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    scales: Tensor | None = None,
) -> None:
    """rope_write.rope_write, queries turned in place.

    The heads of a token lie together; cos, sin and norm are contiguous, and blocks and offsets int64.
    """
    tokens, all_heads, head_dim = heads.shape
    if not tokens:
        return
    kv_heads = layer.shape[2]
    rope_write_kernel[(triton.cdiv(tokens, TOKENS), all_heads)](
        heads,
        cos,
        sin,
        cos if norm is None else norm,
        layer,
        cos if scales is None else scales,
        blocks,
        offsets,
        tokens,
        num_heads,
        kv_heads,
        heads.stride(0),
        layer.stride(0),
        layer.stride(1),
        layer.stride(2),
        0 if scales is None else scales.stride(0),
        eps,
        **constexprs(head_dim, cos.shape[-1], norm is not None, layer.dtype),
        num_warps=num_warps(head_dim),
        num_stages=1,
        enable_fp_fusion=FP_FUSION,
    )


def constexprs(head_dim: int, half: int, norm: bool, stored: torch.dtype) -> dict[str, object]:
    """half: pairs that are turned. stored: the layer's dtype."""
    rest = head_dim - 2 * half
    return {
        "HEAD_DIM": head_dim,
        "HALF": half,
        "NORM": norm,
        "MOST": LARGEST.get(stored, 0.0),
        "TINY": SMALLEST_ROW,
        "TOKENS": TOKENS,
        "HALF_BLOCK": triton.next_power_of_2(half),
        "REST_BLOCK": triton.next_power_of_2(rest) if rest else 0,
        "DIM_BLOCK": triton.next_power_of_2(head_dim),
    }


def num_warps(head_dim: int) -> int:
    return 4 if head_dim <= 128 else 8


def variants() -> list[Variant]:
    """Llama's, Qwen3's, Phi's partial and Gemma's heads, and the two 8-bit memories."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        _variant("bf16-d64", bf16, 64, 32, None, bf16),
        _variant("bf16-d128", bf16, 128, 64, None, bf16),
        _variant("fp16-d128", fp16, 128, 64, None, fp16),
        _variant("fp32-d64", fp32, 64, 32, None, fp32),
        _variant("bf16-d128-norm", bf16, 128, 64, "bf16", bf16),
        _variant("bf16-d96-partial", bf16, 96, 36, None, bf16),
        _variant("bf16-d96", bf16, 96, 48, None, bf16),
        _variant("bf16-d80", bf16, 80, 40, None, bf16),
        _variant("bf16-d256", bf16, 256, 128, None, bf16),
        _variant("bf16-d256-norm-f32", bf16, 256, 128, "fp32", bf16),
        _variant("bf16-d128-int8", bf16, 128, 64, None, torch.int8),
        _variant("bf16-d64-int8", bf16, 64, 32, None, torch.int8),
        _variant("bf16-d256-norm-f32-int8", bf16, 256, 128, "fp32", torch.int8),
        _variant("bf16-d128-fp8", bf16, 128, 64, None, torch.float8_e4m3fn),
    ]


NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}


def _variant(
    name: str, dtype: torch.dtype, head_dim: int, half: int, norm: str | None, stored: torch.dtype
) -> Variant:
    given = f"*{NAMES[dtype]}:16"
    signature = dict.fromkeys(["heads", "cos", "sin"], given)
    signature |= {"norm": f"*{norm}:16" if norm else given, "layer": f"*{NAMES[stored]}:16"}
    eight_bits = stored in LARGEST
    signature |= {"scales": "*fp32:16" if eight_bits else given, "blocks": "*i64:16", "offsets": "*i64:16"}
    signature |= {"tokens": "i32", "num_heads": "i32", "kv_heads": "i32"}
    strides = ["token_stride", "block_stride", "kind_stride", "head_stride", "scale_block_stride"]
    signature |= {**dict.fromkeys(strides, "i32:16"), "eps": "fp32"}
    targets = (90, 100) if stored is torch.float8_e4m3fn else (80, 90, 100)
    return Variant(
        rope_write_kernel,
        name,
        signature,
        constexprs(head_dim, half, norm is not None, stored),
        num_warps(head_dim),
        1,
        targets,
    )
