"""Rounding float32 to 8 bits in Triton: device functions that kernels share.

The rounding is written out and not left to a conversion: Triton's to int8 cuts, and its interpreter's to
fp8 is wrong where a mantissa carries over.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_int8(x):
    """The nearest integer, the even one of two, for |x| <= 127."""
    floor = tl.floor(x)
    rest = x - floor
    odd = floor - 2.0 * tl.floor(floor * 0.5)
    return tl.where((rest > 0.5) | ((rest == 0.5) & (odd > 0)), floor + 1.0, floor).to(tl.int8)


@triton.jit
def to_fp8(x):
    """The nearest float8_e4m3fn, the even one of two, for |x| <= 448 (Micikevicius et al., 2022)."""
    bits = x.to(tl.int32, bitcast=True)
    # Adding just below half of the last of 3 mantissa bits, and 1 more if that is odd, carries as rounding.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Below 2^-6 numbers lie 2^-9 apart, as float32 numbers do at 1.5 * 2^14.
    subnormal = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, subnormal, normal).to(tl.float8e4nv)


@triton.jit
def to_8_bits(x, dtype: tl.constexpr):
    """x in int8 or float8_e4m3fn."""
    return to_int8(x) if dtype == tl.int8 else to_fp8(x)


@triton.jit
def factor_and_scale(largest, most, TINY: tl.constexpr):
    """What rows are multiplied by so that their largest is `most`, and what brings them back.

    Rows below TINY count as zeros. One that is not finite (`largest` of infinity) has factor 0 and a scale of
    NaN.
    """
    finite = largest < float("inf")
    usable = finite & (largest >= TINY)
    factor = tl.where(usable, tl.div_rn(tl.zeros_like(largest) + most, tl.where(usable, largest, 1.0)), 0.0)
    scale = tl.where(usable, tl.div_rn(largest, tl.zeros_like(largest) + most), 0.0)
    return factor, tl.where(finite, scale, float("nan"))


@triton.jit
def magnitude(x):
    """The largest absolute value along the last axis, infinite if any is NaN."""
    size = tl.abs(x)
    return tl.max(tl.where(size == size, size, float("inf")), axis=-1)
