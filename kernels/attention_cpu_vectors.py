"""Attention's vector operations on CPU: a block of keys or values against a register tile of rows, and the
softmax of one row over a split.

Addresses and sizes come in as arguments; what a parameter block or an item is, attention_cpu_kernel.py knows.
May import numba, and is therefore imported when a kernel is first wanted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.attention_cpu_words import LINE, SCORE_BYTES
from pagemill.kernels.cpu_vector import LANES, Lanes, number

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score(
    typing: Any, rows: Any, bf16: Any, dims: Any, query: Any, stride: Any, keys: Any, ahead: Any, scores: Any
) -> Any:
    """scores[rows, 16] = query[rows, dims] @ keys[dims, 16]; brings the block at `ahead` nearer meanwhile."""
    count, half = number(rows), bool(number(bf16))
    size = 2 if half else 4
    unroll = 2

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        dims, query, stride, keys, ahead, scores = args[2:]
        v = Lanes(b)
        rows_at = [b.add(query, b.mul(stride, _I64(i))) for i in range(count)]
        sums = v.variables([v.const(0.0)] * count)
        with cgutils.for_range(b, b.udiv(dims, _I64(unroll)), intp=_I64) as loop:
            for u in range(unroll):
                d = b.add(b.mul(loop.index, _I64(unroll)), _I64(u))
                step = b.mul(d, _I64(LANES * size))
                if u % (LINE // (LANES * size)) == 0:
                    v.prefetch(b.add(ahead, step))
                column = v.load(b.add(keys, step), half)
                for row, total in zip(rows_at, sums, strict=True):
                    x = v.splat(v.load_scalar(b.add(row, b.mul(d, _I64(4)))))
                    b.store(v.fma(x, column, b.load(total)), total)
        for i, total in enumerate(sums):
            v.store(b.load(total), v.at(scores, i * SCORE_BYTES))
        return context.get_dummy_value()

    return types.void(rows, bf16, *[types.int64] * 6), emit


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def weigh(
    typing: Any,
    rows: Any,
    bf16: Any,
    vectors: Any,
    start: Any,
    stop: Any,
    dims: Any,
    count: Any,
    weights: Any,
    values: Any,
    ahead: Any,
    sums: Any,
) -> Any:
    """sums[rows, start:stop] += weights[rows, :count] @ values[:count, start:stop].

    `start` and `stop` count vectors of the `dims` numbers of a value; so many `vectors` are summed at once.
    Values from `count` on are not read: behind a row's end they may be anything, and 0 * NaN is NaN.
    """
    height, half, width = number(rows), bool(number(bf16)), number(vectors)
    size = 2 if half else 4

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        start, stop, dims, count, weights, values, ahead, sums = args[3:]
        v = Lanes(b)
        row_bytes, value_bytes = b.mul(dims, _I64(4)), b.mul(dims, _I64(size))
        with cgutils.for_range_slice(b, start, stop, _I64(width), intp=_I64) as (index, _):
            first = b.add(sums, b.mul(index, _I64(LINE)))
            places = [
                v.at(b.add(first, b.mul(row_bytes, _I64(i))), j * LINE)
                for i in range(height)
                for j in range(width)
            ]
            totals = v.variables([v.load(place) for place in places])
            with cgutils.for_range(b, count, intp=_I64) as loop:
                offset = b.add(b.mul(index, _I64(LANES * size)), b.mul(value_bytes, loop.index))
                value, weight = b.add(values, offset), b.add(weights, b.mul(loop.index, _I64(4)))
                columns = []
                for j in range(width):
                    if j * LANES * size % LINE == 0:
                        v.prefetch(v.at(b.add(ahead, offset), j * LANES * size))
                    columns.append(v.load(v.at(value, j * LANES * size), half))
                for i in range(height):
                    x = v.splat(v.load_scalar(v.at(weight, i * SCORE_BYTES)))
                    for total, column in zip(totals[i * width :], columns, strict=False):
                        b.store(v.fma(x, column, b.load(total)), total)
            for place, total in zip(places, totals, strict=True):
                v.store(b.load(total), place)
        return context.get_dummy_value()

    return types.void(rows, bf16, vectors, *[types.int64] * 8), emit


@intrinsic  # type: ignore[untyped-decorator]
def mask(typing: Any, scores: Any, first: Any, last: Any, blocks: Any) -> Any:
    """scores[:first] and scores[last : 16 * blocks] = -inf, whatever was there."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        scores, first, last, blocks = args
        v = Lanes(b)
        low, high = v.splat(b.trunc(first, _I32)), v.splat(b.trunc(last, _I32))
        lanes = ir.Constant(low.type, list(range(LANES)))

        def hide(block: Any) -> None:
            at = b.add(scores, b.mul(block, _I64(LINE)))
            key = b.add(lanes, v.splat(b.trunc(b.mul(block, _I64(LANES)), _I32)))
            seen = b.and_(b.icmp_signed(">=", key, low), b.icmp_signed("<", key, high))
            v.store(b.select(seen, v.load(at), v.const(-np.inf)), at)

        before = b.udiv(b.add(first, _I64(LANES - 1)), _I64(LANES))
        with cgutils.for_range(b, before, intp=_I64) as loop:
            hide(loop.index)
        with cgutils.for_range_slice(b, b.udiv(last, _I64(LANES)), blocks, _I64(1), intp=_I64) as (index, _):
            hide(index)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@intrinsic  # type: ignore[untyped-decorator]
def exponentiate(typing: Any, scores: Any, blocks: Any, old: Any, totals: Any) -> Any:
    """scores = 2**(scores - new), new = max(old, all scores), which is returned.

    totals [16] = totals * 2**(old - new) + the sum of what is now in `scores`, lane by lane.
    """

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        scores, blocks, old, totals = args
        v = Lanes(b)
        (top,) = v.variables([v.splat(old)])
        with cgutils.for_range(b, blocks, intp=_I64) as loop:
            at = b.add(scores, b.mul(loop.index, _I64(LINE)))
            b.store(v.max(b.load(top), v.load(at)), top)
        new = v.largest(b.load(top))
        shift = v.splat(new)
        (total,) = v.variables([v.const(0.0)])
        with cgutils.for_range(b, blocks, intp=_I64) as loop:
            at = b.add(scores, b.mul(loop.index, _I64(LINE)))
            weight = v.exp2(b.fsub(v.load(at), shift))
            v.store(weight, at)
            b.store(b.fadd(b.load(total), weight), total)
        factor = v.exp2(b.fsub(v.splat(old), shift))
        v.store(v.fma(v.load(totals), factor, b.load(total)), totals)
        return new

    return types.float32(types.int64, types.int64, types.float32, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def cap(typing: Any, scores: Any, blocks: Any, cap: Any) -> Any:
    """scores = cap * tanh(scores)."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        scores, blocks, cap = args
        v = Lanes(b)
        with cgutils.for_range(b, blocks, intp=_I64) as loop:
            at = b.add(scores, b.mul(loop.index, _I64(LINE)))
            v.store(b.fmul(v.tanh(v.load(at)), v.splat(cap)), at)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), emit


@intrinsic  # type: ignore[untyped-decorator]
def fill(typing: Any, at: Any, vectors: Any, value: Any) -> Any:
    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        v = Lanes(b)
        with cgutils.for_range(b, args[1], intp=_I64) as loop:
            v.store(v.splat(args[2]), b.add(args[0], b.mul(loop.index, _I64(LINE))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), emit


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def scale(
    typing: Any, from_half: Any, to_half: Any, source: Any, target: Any, vectors: Any, factor: Any
) -> Any:
    """target = source * factor; either may be bfloat16, by literals."""
    reads, writes = bool(number(from_half)), bool(number(to_half))

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, target, vectors, factor = args[2:]
        v = Lanes(b)
        with cgutils.for_range(b, vectors, intp=_I64) as loop:
            x = v.load(b.add(source, b.mul(loop.index, _I64(32 if reads else 64))), reads)
            to = b.add(target, b.mul(loop.index, _I64(32 if writes else 64)))
            v.store(b.fmul(x, v.splat(factor)), to, writes)
        return context.get_dummy_value()

    return types.void(from_half, to_half, *[types.int64] * 3, types.float32), emit


@intrinsic  # type: ignore[untyped-decorator]
def total(typing: Any, at: Any) -> Any:
    """The sum of one vector."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        v = Lanes(b)
        return v.sum(v.load(args[0]))

    return types.float32(types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def exp2(typing: Any, x: Any) -> Any:
    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        v = Lanes(b)
        return b.extract_element(v.exp2(v.splat(args[0])), _I32(0))

    return types.float32(types.float32), emit
