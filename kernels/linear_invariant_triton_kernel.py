"""A dense layer in Triton whose sums have one order: for linear_invariant.py."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def invariant_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    inputs,
    x_stride,
    out_stride,
    BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out [rows, outputs] = x [rows, inputs] weight^T [outputs, inputs] + bias [outputs], sums in float32.

    Programs: one for each tile. A number is summed over the inputs from the first to the last, BLOCK_K at a
    time, in a tile of one size; so where its row stands, and beside how many, changes nothing.
    """
    program = tl.program_id(0)
    columns = tl.cdiv(outputs, BLOCK_N)
    group = program // (GROUP * columns)
    height = tl.minimum(tl.cdiv(rows, BLOCK_M) - group * GROUP, GROUP)
    inner = program % (GROUP * columns)
    m = (group * GROUP + inner % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (inner // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    left = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    right = weight + n.to(tl.int64)[None, :] * inputs + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        there = k < inputs - start
        a = tl.load(left + start, mask=(m < rows)[:, None] & there[None, :], other=0.0)
        b = tl.load(right + start, mask=(n < outputs)[None, :] & there[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    places = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])
