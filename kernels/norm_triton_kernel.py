"""RMSNorm in Triton: a program a vector, the sum of squares in float32.

Device code only; shapes and launches are norm_triton.py's business.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalised(x, weight, width, eps):
    """x / rms(x) * weight of a float32 vector whose places behind `width` are 0, in float32.

    A weight of 16 bits multiplies the value rounded to its dtype, and the product is rounded to it again.
    """
    factor = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=-1, keep_dims=True) / width + eps)
    scaled = (x * factor).to(weight.dtype)
    return (scaled.to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


@triton.jit
def rms_norm_kernel(
    x, weight, out, token_stride, vector_stride, vectors, weight_stride, width, eps, BLOCK: tl.constexpr
):
    """Program i: vector i % vectors of token i // vectors; `out` is contiguous."""
    program = tl.program_id(0).to(tl.int64)
    token, vector = program // vectors, program % vectors
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + token * token_stride + vector * vector_stride + at, mask=inside, other=0.0)
    scale = tl.load(weight + vector * weight_stride + at, mask=inside, other=0.0)
    result = normalised(value.to(tl.float32), scale, width, eps)
    tl.store(out + program * width + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    residual,
    x,
    inner_weight,
    weight,
    out,
    residual_stride,
    x_stride,
    width,
    eps,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i: residual[i] += x[i], by way of inner_weight if INNER; out[i] = the norm of that."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    if INNER:
        scale = tl.load(inner_weight + at, mask=inside, other=0.0)
        value = normalised(value.to(tl.float32), scale, width, eps).to(value.dtype)
    places = residual + row * residual_stride + at
    total = tl.load(places, mask=inside, other=0.0).to(tl.float32) + value.to(tl.float32)
    # The stored sum is what the next layer reads, so the norm is of the rounded one.
    total = total.to(residual.dtype.element_ty)
    tl.store(places, total, mask=inside)
    scale = tl.load(weight + at, mask=inside, other=0.0)
    result = normalised(total.to(tl.float32), scale, width, eps)
    tl.store(out + row * width + at, result.to(out.dtype.element_ty), mask=inside)
