"""Launches dense layers whose sums have one order, in Triton, for linear_invariant.py.

Not to be imported where triton may be missing.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pagemill.kernels.linear_invariant_triton_kernel import invariant_kernel
from pagemill.kernels.variants import FP_FUSION, Variant

GROUP = 8
# Rows, outputs and inputs of a tile, warps and stages, by the bytes of a number. Never chosen by the number
# of rows: another tile may sum in another order.
TILES = {2: (64, 64, 64, 4, 3), 4: (32, 32, 32, 4, 3)}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in], weight [out, in], bias [out], of one dtype; returns [rows, out] in it."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    m, n, _, warps, stages = TILES[x.element_size()]
    invariant_kernel[(triton.cdiv(rows, m) * triton.cdiv(outputs, n),)](
        x,
        weight,
        bias,
        out,
        rows,
        outputs,
        inputs,
        x.stride(0),
        out.stride(0),
        BIASED=bias is not None,
        **_blocks(x.element_size()),
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=FP_FUSION,
    )
    return out


def _blocks(bytes_each: int) -> dict[str, int]:
    m, n, k, _, _ = TILES[bytes_each]
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": GROUP}


def variants() -> list[Variant]:
    found = []
    for dtype, bytes_each in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        signature = dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}:16")
        signature |= {"rows": "i32"} | dict.fromkeys(
            ("outputs", "inputs", "x_stride", "out_stride"), "i32:16"
        )
        _, _, _, warps, stages = TILES[bytes_each]
        constexprs = {"BIASED": True, **_blocks(bytes_each)}
        found.append(Variant(invariant_kernel, dtype, signature, constexprs, warps, stages))
    return found
