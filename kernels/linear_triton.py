"""Launches dense layers in 8 bits in Triton, for linear_int8.py and linear_fp8.py.

Not to be imported where triton may be missing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pagemill.kernels.eight_bits import LARGEST, SMALLEST_ROW
from pagemill.kernels.linear_triton_kernel import multiply_kernel, round_rows_kernel
from pagemill.kernels.variants import Variant

# Not FP_FUSION: a product and a sum rounded once would give other bits than linear_int8.py promises of all
# its implementations.
FP_FUSION = False
GROUP = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, outputs and inputs of a program's product."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


def tile(rows: int) -> Tile:
    """Few rows: narrow tiles, so that many programs read the weights. Many: what Hopper's wgmma needs."""
    if rows <= 16:
        return Tile(16, 32, 128, 4, 4)
    if rows <= 64:
        return Tile(64, 64, 128, 4, 4)
    return Tile(128, 128, 128, 8, 3)


class Layer:
    """y = x W^T + b in 8 bits.

    values: int8 or float8_e4m3fn [out, in], rotated in blocks of `block` numbers (1: not at all).
    scales, bias: float32 [out].
    """

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor, block: int) -> None:
        self.values, self.scales, self.bias, self.block = values.contiguous(), scales, bias, block
        self.out_features, self.in_features = values.shape

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, in] -> [tokens, out] in x's dtype."""
        rows = x.shape[0]
        out = torch.empty((rows, self.out_features), dtype=x.dtype, device=x.device)
        if not rows:
            return out
        rounded, scales = round_rows(x, self.values.dtype, self.block)
        shape = tile(rows)
        programs = triton.cdiv(rows, shape.m) * triton.cdiv(self.out_features, shape.n)
        multiply_kernel[(programs,)](
            rounded,
            scales,
            self.values,
            self.scales,
            self.bias,
            out,
            rows,
            self.out_features,
            self.in_features,
            out.stride(0),
            **multiply_constexprs(self.values.dtype, shape),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            enable_fp_fusion=FP_FUSION,
        )
        return out


def round_rows(x: Tensor, dtype: torch.dtype, block: int) -> tuple[Tensor, Tensor]:
    """eight_bits.round_rows of x [rows, width], rotated in blocks of `block`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    round_rows_kernel[(x.shape[0],)](
        x,
        values,
        scales,
        x.stride(0),
        x.shape[1],
        **round_constexprs(x.shape[1], dtype, block),
        num_warps=round_warps(x.shape[1]),
        num_stages=1,
        enable_fp_fusion=FP_FUSION,
    )
    return values, scales


def round_constexprs(width: int, dtype: torch.dtype, block: int) -> dict[str, object]:
    return {
        "STEPS": block.bit_length() - 1,
        "MOST": LARGEST[dtype],
        "TINY": SMALLEST_ROW,
        "BLOCK": max(triton.next_power_of_2(width), block),
    }


def round_warps(width: int) -> int:
    return int(min(16, max(1, triton.next_power_of_2(width) // 512)))


def multiply_constexprs(dtype: torch.dtype, shape: Tile) -> dict[str, object]:
    blocks = {"BLOCK_M": shape.m, "BLOCK_N": shape.n, "BLOCK_K": shape.k}
    return {"INTEGER": dtype is torch.int8, **blocks, "GROUP": GROUP}


NAMES = {torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv"}


def variants() -> list[Variant]:
    """Each tile in both kinds; rows of Llama's hidden and inner width. fp8 has no matrix unit below sm_89."""
    found = []
    for dtype, name in NAMES.items():
        targets = (80, 90, 100) if dtype is torch.int8 else (90, 100)
        found += [_multiply(dtype, rows, targets) for rows in (16, 64, 512)]
        for width in (4096, 14336):
            block = 128 if dtype is torch.int8 else 1
            signature = {"x": "*bf16:16", "values": f"*{name}:16", "scales": "*fp32:16"}
            signature |= {"row_stride": "i32:16", "width": "i32:16"}
            constexprs = round_constexprs(width, dtype, block)
            how = (constexprs, round_warps(width), 1, targets)
            found.append(Variant(round_rows_kernel, f"{name}-{width}", signature, *how))
    return found


def _multiply(dtype: torch.dtype, rows: int, targets: tuple[int, ...]) -> Variant:
    name, shape = NAMES[dtype], tile(rows)
    signature = {"values": f"*{name}:16", "scales": "*fp32:16", "weight": f"*{name}:16"}
    signature |= {"weight_scales": "*fp32:16", "bias": "*fp32:16", "out": "*bf16:16"}
    signature |= {"rows": "i32", **dict.fromkeys(["outputs", "inputs", "out_stride"], "i32:16")}
    return Variant(
        multiply_kernel,
        f"{name}-m{shape.m}",
        signature,
        multiply_constexprs(dtype, shape),
        shape.num_warps,
        shape.num_stages,
        targets,
        wgmma=shape.m >= 64,
    )
