"""Norm of queries and keys, rotation, rounding and write to blocks in one pass, in Triton.

A program does one head of TOKENS tokens. Keys lie transposed in a block, 16 tokens side by side, so a tile
of neighbouring tokens is written along the tokens: one sector of 32 bytes takes 16 keys of a dimension.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from pagemill.kernels.round_triton_kernel import factor_and_scale, magnitude, to_8_bits

# Tokens of a block of memory; as in cache_write.py.
BLOCK_SIZE: tl.constexpr = tl.constexpr(16)


@triton.jit
def _rounded(value, factor, out_type: tl.constexpr):
    """value [tokens, n] * factor [tokens] in 8 bits; values of a token with factor 0 may be NaN."""
    return to_8_bits(tl.where((factor > 0)[:, None], value, 0.0) * factor[:, None], out_type)


@triton.jit
def rope_write_kernel(
    heads,
    cos,
    sin,
    norm,
    layer,
    scales,
    blocks,
    offsets,
    tokens,
    num_heads,
    kv_heads,
    token_stride,
    block_stride,
    kind_stride,
    head_stride,
    scale_block_stride,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """heads [tokens, query + key + value heads, HEAD_DIM], queries are turned in place.

    cos, sin [tokens, HALF]; norm [query + key heads, HEAD_DIM]; layer and scales as strides say, MOST the
    largest number of its 8-bit dtype or 0 where it is not of 8 bits.
    """
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1)
    there = token < tokens
    rows = heads + token[:, None] * token_stride + head * HEAD_DIM
    place = tl.load(blocks + token, mask=there, other=0).to(tl.int64)
    offset = tl.load(offsets + token, mask=there, other=0).to(tl.int64)
    if head < num_heads + kv_heads:
        i = tl.arange(0, HALF_BLOCK)
        turning = there[:, None] & (i < HALF)[None, :]
        first_narrow = tl.load(rows + i[None, :], mask=turning, other=0.0)
        second_narrow = tl.load(rows + HALF + i[None, :], mask=turning, other=0.0)
        first, second = first_narrow.to(tl.float32), second_narrow.to(tl.float32)
        if REST_BLOCK > 0:
            j = 2 * HALF + tl.arange(0, REST_BLOCK)
            passing = there[:, None] & (j < HEAD_DIM)[None, :]
            rest = tl.load(rows + j[None, :], mask=passing, other=0.0).to(tl.float32)
        narrow = first_narrow.dtype
        if NORM:
            squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
            if REST_BLOCK > 0:
                squares += tl.sum(rest * rest, axis=1)
            inverse = (1.0 / tl.sqrt_rn(squares / HEAD_DIM + eps))[:, None]
            weights = norm + head * HEAD_DIM
            first = _weighted(first * inverse, tl.load(weights + i, mask=i < HALF, other=0.0), narrow)
            second = _weighted(
                second * inverse, tl.load(weights + HALF + i, mask=i < HALF, other=0.0), narrow
            )
            if REST_BLOCK > 0:
                rest = _weighted(rest * inverse, tl.load(weights + j, mask=j < HEAD_DIM, other=0.0), narrow)
        angle = token[:, None] * HALF + i[None, :]
        c = tl.load(cos + angle, mask=turning, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=turning, other=0.0).to(tl.float32)
        # Each product is rounded before they are added, as where torch does one operation after another.
        turned = (first * c).to(narrow).to(tl.float32) - (second * s).to(narrow).to(tl.float32)
        second = (second * c).to(narrow).to(tl.float32) + (first * s).to(narrow).to(tl.float32)
        first, second = turned.to(narrow).to(tl.float32), second.to(narrow).to(tl.float32)
        if head < num_heads:
            tl.store(rows + i[None, :], first.to(narrow), mask=turning)
            tl.store(rows + HALF + i[None, :], second.to(narrow), mask=turning)
            if NORM and REST_BLOCK > 0:
                tl.store(rows + j[None, :], rest.to(narrow), mask=passing)
        else:
            kv = head - num_heads
            stored: tl.constexpr = layer.dtype.element_ty
            if MOST > 0:
                largest = tl.maximum(magnitude(first), magnitude(second))
                if REST_BLOCK > 0:
                    largest = tl.maximum(largest, magnitude(rest))
                factor, scale = factor_and_scale(largest, MOST, TINY)
                at = place * scale_block_stride + kv * BLOCK_SIZE + offset
                tl.store(scales + at, scale, mask=there)
                low = _rounded(first, factor, stored)
                high = _rounded(second, factor, stored)
                if REST_BLOCK > 0:
                    tail = _rounded(rest, factor, stored)
            else:
                low, high = first.to(stored), second.to(stored)
                if REST_BLOCK > 0:
                    tail = rest.to(stored)
            keys = layer + place[None, :] * block_stride + kv * head_stride + offset[None, :]
            dims = i[:, None] * BLOCK_SIZE
            upright = there[None, :] & (i < HALF)[:, None]
            tl.store(keys + dims, tl.trans(low), mask=upright)
            tl.store(keys + HALF * BLOCK_SIZE + dims, tl.trans(high), mask=upright)
            if REST_BLOCK > 0:
                upright_rest = there[None, :] & (j < HEAD_DIM)[:, None]
                tl.store(keys + j[:, None] * BLOCK_SIZE, tl.trans(tail), mask=upright_rest)
    else:
        kv = head - num_heads - kv_heads
        d = tl.arange(0, DIM_BLOCK)
        inside = there[:, None] & (d < HEAD_DIM)[None, :]
        value = tl.load(rows + d[None, :], mask=inside, other=0.0)
        values = layer + place[:, None] * block_stride + kind_stride + kv * head_stride
        values += offset[:, None] * HEAD_DIM + d[None, :]
        if MOST > 0:
            wide = value.to(tl.float32)
            value_factor, value_scale = factor_and_scale(magnitude(wide), MOST, TINY)
            value_at = place * scale_block_stride + (kv_heads + kv) * BLOCK_SIZE + offset
            tl.store(scales + value_at, value_scale, mask=there)
            tl.store(values, _rounded(wide, value_factor, layer.dtype.element_ty), mask=inside)
        else:
            tl.store(values, value.to(layer.dtype.element_ty), mask=inside)


@triton.jit
def _weighted(scaled, weight, narrow: tl.constexpr):
    """The end of RMSNorm in norm.py's order, rounded to the vectors' own dtype and widened again."""
    product = scaled.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]
    return product.to(weight.dtype).to(narrow).to(tl.float32)
