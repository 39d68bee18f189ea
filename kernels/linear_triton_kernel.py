"""Dense layers in 8 bits in Triton: rounding rows with a scale each, and the product of rounded rows.

int8 is exact: 32-bit sums of 8-bit products. fp8 (e4m3) leaves 14 bits to what Hopper's matrix unit adds up
by itself, so its sums go over into float32 every BLOCK_K (DeepSeek-V3, 2024, section 3.3).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from pagemill.kernels.round_triton_kernel import factor_and_scale, magnitude, to_8_bits


@triton.jit
def round_rows_kernel(
    x,
    values,
    scales,
    row_stride,
    width,
    STEPS: tl.constexpr,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program row: values [rows, width] of 8 bits, scales [rows]; rotated in blocks of 2 ** STEPS before.

    The butterflies are those of linear_int8.rotate, in its order: the same bits.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    number = tl.load(x + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    for step in tl.static_range(STEPS):
        pairs = tl.reshape(number, (BLOCK // (2 << step), 2, 1 << step))
        first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
        turned = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
        number = tl.reshape(turned, (BLOCK,))
    line = tl.reshape(number, (1, BLOCK))
    factor, scale = factor_and_scale(magnitude(line), MOST, TINY)
    tl.store(scales + row + tl.arange(0, 1), scale)
    rounded = tl.where((factor > 0)[:, None], line, 0.0) * factor[:, None]
    tl.store(
        values + row * width + at,
        tl.reshape(to_8_bits(rounded, values.dtype.element_ty), (BLOCK,)),
        mask=inside,
    )


@triton.jit
def multiply_kernel(
    values,
    scales,
    weight,
    weight_scales,
    bias,
    out,
    rows,
    outputs,
    inputs,
    out_stride,
    INTEGER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out [rows, outputs] = (values weight^T) * scales * weight_scales + bias.

    values [rows, inputs], weight [outputs, inputs] of 8 bits; scales [rows]; weight_scales, bias [outputs].
    """
    # Programs beside each other share rows and weights: GROUP tiles of rows go over the columns together.
    program = tl.program_id(0)
    columns = tl.cdiv(outputs, BLOCK_N)
    group = program // (GROUP * columns)
    height = tl.minimum(tl.cdiv(rows, BLOCK_M) - group * GROUP, GROUP)
    inner = program % (GROUP * columns)
    m = (group * GROUP + inner % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (inner // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    left = values + m.to(tl.int64)[:, None] * inputs + k[None, :]
    right = weight + n.to(tl.int64)[None, :] * inputs + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INTEGER else tl.float32)
    for start in range(0, inputs, BLOCK_K):
        there = k < inputs - start
        a = tl.load(left + start, mask=(m < rows)[:, None] & there[None, :], other=0.0)
        b = tl.load(right + start, mask=(n < outputs)[None, :] & there[:, None], other=0.0)
        if INTEGER:
            total = tl.dot(a, b, total, out_dtype=tl.int32)
        else:
            total = tl.dot(a, b, total, max_num_imprecise_acc=BLOCK_K)
    row_scales = tl.load(scales + m, mask=m < rows, other=0.0)
    column_scales = tl.load(weight_scales + n, mask=n < outputs, other=0.0)
    result = total.to(tl.float32) * row_scales[:, None] * column_scales[None, :]
    result = (result + tl.load(bias + n, mask=n < outputs, other=0.0)[None, :]).to(out.dtype.element_ty)
    places = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(places, result, mask=inside)
