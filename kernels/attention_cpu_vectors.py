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
from pagemill.kernels.cpu_kinds import FLOAT32, PAIRS, WIDENED
from pagemill.kernels.cpu_vector import LANES, Lanes, number

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


class _Keys:
    """How keys [dims, 16] meet a query's numbers, one dimension a step or two of bfloat16.

    packed: the pairs of `pack_keys`; then nothing is fetched ahead, which that has done.
    """

    def __init__(self, v: Lanes, kind: int, packed: bool) -> None:
        self.v, self.kind, self.packed = v, kind, packed
        self.together = 2 if kind == PAIRS else 1
        size = 4 if kind == FLOAT32 else 2
        self.step = LANES * size * self.together  # bytes of keys
        self.query_step = size * self.together if kind == PAIRS else 4  # and of a query
        self.steps_a_line = max(1, LINE // self.step)

    def line(self, at: Any) -> Any:
        if self.kind != PAIRS:
            return self.v.load(at, self.kind == WIDENED)
        return self.v.load_pairs(at) if self.packed else self.v.interleave(at, self.v.at(at, LANES * 2))

    def factor(self, at: Any) -> Any:
        """A query's numbers at an address, for all lanes."""
        return self.v.splat_pair(at) if self.kind == PAIRS else self.v.splat(self.v.load_scalar(at))

    def add(self, sum_: Any, line: Any, factor: Any) -> Any:
        return self.v.dot(sum_, factor, line) if self.kind == PAIRS else self.v.fma(factor, line, sum_)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score(
    typing: Any,
    rows: Any,
    kind: Any,
    packed: Any,
    blocks: Any,
    dims: Any,
    query: Any,
    stride: Any,
    keys: Any,
    ahead: Any,
    factor: Any,
    scores: Any,
) -> Any:
    """scores[rows, 16 * blocks] = query[rows, dims] @ keys[dims, 16] of each block, and brings others nearer.

    keys, ahead: tuples of addresses, of at least so many blocks. Queries in pairs are as they came, and
    scores are multiplied by `factor`; others were before.
    """
    count, chosen, ready, wide = number(rows), number(kind), bool(number(packed)), number(blocks)
    unroll = 2

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        dims, query, stride, keys, ahead, factor, scores = args[4:]
        v = Lanes(b)
        unit = _Keys(v, chosen, ready)
        keys_at, ahead_at = ([b.extract_value(many, i) for i in range(wide)] for many in (keys, ahead))
        rows_at = [b.add(query, b.mul(stride, _I64(i))) for i in range(count)]
        sums = [v.variables([v.const(0.0)] * wide) for _ in range(count)]
        with cgutils.for_range(b, b.udiv(dims, _I64(unroll * unit.together)), intp=_I64) as loop:
            for u in range(unroll):
                k = b.add(b.mul(loop.index, _I64(unroll)), _I64(u))
                step = b.mul(k, _I64(unit.step))
                if not ready and u % unit.steps_a_line == 0:
                    for at in ahead_at:
                        v.prefetch(b.add(at, step))
                lines = [unit.line(b.add(at, step)) for at in keys_at]
                for row, sums_of_row in zip(rows_at, sums, strict=True):
                    x = unit.factor(b.add(row, b.mul(k, _I64(unit.query_step))))
                    for line, total in zip(lines, sums_of_row, strict=True):
                        b.store(unit.add(b.load(total), line, x), total)
        for i, sums_of_row in enumerate(sums):
            for j, total in enumerate(sums_of_row):
                value = b.load(total)
                if chosen == PAIRS:
                    value = b.fmul(value, v.splat(factor))
                v.store(value, v.at(scores, i * SCORE_BYTES + j * LINE))
        return context.get_dummy_value()

    integers = [types.int64] * 3
    signature = types.void(rows, kind, packed, blocks, *integers, keys, ahead, types.float32, types.int64)
    return signature, emit


@intrinsic  # type: ignore[untyped-decorator]
def pack_keys(typing: Any, dims: Any, keys: Any, ahead: Any, target: Any) -> Any:
    """target [dims / 2, 16] = pairs of neighbouring dimensions of keys [dims, 16] in bfloat16."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        dims, keys, ahead, target = args
        v = Lanes(b)
        with cgutils.for_range(b, b.udiv(dims, _I64(2)), intp=_I64) as loop:
            step = b.mul(loop.index, _I64(LINE))
            v.prefetch(b.add(ahead, step))
            at = b.add(keys, step)
            v.store_pairs(v.interleave(at, v.at(at, LINE // 2)), b.add(target, step))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@intrinsic  # type: ignore[untyped-decorator]
def pack_values(typing: Any, dims: Any, count: Any, values: Any, ahead: Any, target: Any) -> Any:
    """target [ceil(count / 2), dims] = pairs of neighbouring tokens of values[:count, dims] in bfloat16.

    An odd one has zeros beside it: what lies behind a row's end is not read.
    """

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        dims, count, values, ahead, target = args
        v = Lanes(b)
        value_bytes, pair_bytes = b.mul(dims, _I64(2)), b.mul(dims, _I64(4))
        vectors = b.udiv(dims, _I64(LANES))

        def pack(pair: Any, odd: bool) -> None:
            offset = b.mul(pair, pair_bytes)
            with cgutils.for_range(b, vectors, intp=_I64) as loop:
                low = b.add(b.add(values, offset), b.mul(loop.index, _I64(LINE // 2)))
                place = b.add(offset, b.mul(loop.index, _I64(LINE)))
                v.prefetch(b.add(ahead, place))
                pairs = v.interleave(low, None if odd else b.add(low, value_bytes))
                v.store_pairs(pairs, b.add(target, place))

        with cgutils.for_range(b, b.udiv(count, _I64(2)), intp=_I64) as loop:
            pack(loop.index, odd=False)
        with b.if_then(b.icmp_signed("!=", b.and_(count, _I64(1)), _I64(0))):
            pack(b.udiv(count, _I64(2)), odd=True)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def weigh(
    typing: Any,
    rows: Any,
    kind: Any,
    packed: Any,
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
    packed: the values are the pairs of `pack_values`.
    """
    height, width, chosen, ready = number(rows), number(vectors), number(kind), bool(number(packed))
    size = 4 if chosen == FLOAT32 else 2
    together = 2 if chosen == PAIRS else 1

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        start, stop, dims, count, weights, values, ahead, sums = args[4:]
        v = Lanes(b)
        row_bytes = b.mul(dims, _I64(4))
        value_bytes = b.mul(dims, _I64(size))
        # Of a packed pair's vector, and of a value's.
        vector_bytes = LINE if ready else LANES * size
        with cgutils.for_range_slice(b, start, stop, _I64(width), intp=_I64) as (index, _):
            first = b.add(sums, b.mul(index, _I64(LINE)))
            places = [
                v.at(b.add(first, b.mul(row_bytes, _I64(i))), j * LINE)
                for i in range(height)
                for j in range(width)
            ]
            totals = v.variables([v.load(place) for place in places])

            def column(at: Any, odd: bool) -> Any:
                if chosen != PAIRS:
                    return v.load(at, chosen == WIDENED)
                if ready:
                    return v.load_pairs(at)
                return v.interleave(at, None if odd else b.add(at, value_bytes))

            def step(k: Any, odd: bool = False) -> None:
                offset = b.add(b.mul(index, _I64(vector_bytes)), b.mul(b.mul(value_bytes, k), _I64(together)))
                value = b.add(values, offset)
                # A pair of weights is as large as one in float32.
                weight = b.add(weights, b.mul(k, _I64(4)))
                columns = []
                for j in range(width):
                    if not ready and j * vector_bytes % LINE == 0:
                        v.prefetch(v.at(b.add(ahead, offset), j * vector_bytes))
                        if together == 2:
                            v.prefetch(b.add(value_bytes, v.at(b.add(ahead, offset), j * vector_bytes)))
                    columns.append(column(v.at(value, j * vector_bytes), odd))
                for i in range(height):
                    at = v.at(weight, i * SCORE_BYTES)
                    x = v.splat_pair(at) if chosen == PAIRS else v.splat(v.load_scalar(at))
                    for total, line in zip(totals[i * width :], columns, strict=False):
                        sum_ = b.load(total)
                        sum_ = v.dot(sum_, x, line) if chosen == PAIRS else v.fma(x, line, sum_)
                        b.store(sum_, total)

            steps = b.udiv(b.add(count, _I64(1)), _I64(2)) if ready else b.udiv(count, _I64(together))
            with cgutils.for_range(b, steps, intp=_I64) as loop:
                step(loop.index)
            if chosen == PAIRS and not ready:
                with b.if_then(b.icmp_signed("!=", b.and_(count, _I64(1)), _I64(0))):
                    step(b.udiv(count, _I64(2)), odd=True)
            for place, total in zip(places, totals, strict=True):
                v.store(b.load(total), place)
        return context.get_dummy_value()

    return types.void(rows, kind, packed, vectors, *[types.int64] * 8), emit


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


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def exponentiate(typing: Any, kind: Any, scores: Any, blocks: Any, old: Any, totals: Any) -> Any:
    """scores = 2**(scores - new), new = max(old, all scores), which is returned.

    totals [16] = totals * 2**(old - new) + the sum of what is now in `scores`, lane by lane. For values in
    pairs weights become bfloat16, one behind another in the first half of the row, and are summed as such.
    """
    pairs = number(kind) == PAIRS

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        scores, blocks, old, totals = args[1:]
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
            if pairs:
                narrow = v.narrowed(weight)
                v.store_pairs(narrow, b.add(scores, b.mul(loop.index, _I64(LINE // 2))))
                weight = v.widened(narrow)
            else:
                v.store(weight, at)
            b.store(b.fadd(b.load(total), weight), total)
        factor = v.exp2(b.fsub(v.splat(old), shift))
        v.store(v.fma(v.load(totals), factor, b.load(total)), totals)
        return new

    return types.float32(kind, types.int64, types.int64, types.float32, types.int64), emit


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
