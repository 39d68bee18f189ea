"""The inner part of attention on CPU: one tile of queries against the blocks of its row, in numba.

A tile is a run of a row's query tokens with all query heads of one or several kv heads. Its rows go over
the keys in splits of 256, each at a fixed place: scores, softmax with a running maximum (Dao et al., 2022),
weighted values. What a query sums and in which order depends on its position alone, so its bits are the
same as a decode token, inside a prefill chunk, and on any thread.

Scratch memory of a thread, by addresses from the tile's words: scaled queries and sums [rows, head_dim],
scores [rows, 256 (+ 16 against cache aliasing)], running maxima [rows] and totals [rows, 16], all float32.

May import numba, and is therefore imported when a kernel is first wanted. The words of the parameter block
are named in attention_cpu_words.py; attention_cpu.py says how work is cut into items.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.attention_cpu_words import (
    BLOCK_BYTES,
    GROUP,
    HALF,
    HEAD_BYTES,
    HEAD_DIM,
    ITEM,
    ITEM_LIST,
    ITEM_WORDS,
    ITEMS,
    LAYER,
    LINE,
    MAXIMA,
    OUT,
    OUT_HEAD,
    OUT_TOKEN,
    QUERY,
    QUERY_HEAD,
    QUERY_TOKEN,
    SCALE,
    SCORE_BYTES,
    SCORES,
    SCRATCH,
    SCRATCH_BYTES,
    SOFTCAP,
    SPLIT_BLOCKS,
    SUMS,
    TABLES,
    THREAD,
    TILE_ROWS,
    TOTALS,
    VALUES,
    WINDOW,
)
from pagemill.kernels.cpu_compile import c_function, inner
from pagemill.kernels.cpu_vector import LANES, Lanes, get, number, put, real, take, word, word32

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _score(
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
def _weigh(
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
def _mask(typing: Any, scores: Any, first: Any, last: Any, blocks: Any) -> Any:
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
def _exponentiate(typing: Any, scores: Any, blocks: Any, old: Any, totals: Any) -> Any:
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
def _cap(typing: Any, scores: Any, blocks: Any, cap: Any) -> Any:
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
def _fill(typing: Any, at: Any, vectors: Any, value: Any) -> Any:
    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        v = Lanes(b)
        with cgutils.for_range(b, args[1], intp=_I64) as loop:
            v.store(v.splat(args[2]), b.add(args[0], b.mul(loop.index, _I64(LINE))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), emit


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _scale(
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
def _total(typing: Any, at: Any) -> Any:
    """The sum of one vector."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        v = Lanes(b)
        return v.sum(v.load(args[0]))

    return types.float32(types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def _exp2(typing: Any, x: Any) -> Any:
    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        v = Lanes(b)
        return b.extract_element(v.exp2(v.splat(args[0])), _I32(0))

    return types.float32(types.float32), emit


@inner
def _begin(params: int, mine: int, item: int, head: int, row: int) -> None:
    """Loads and scales the queries of one kv head, and clears what is summed, from scratch row `row` on."""
    tokens, group, dims = word(item, 1), word(params, GROUP), word(params, HEAD_DIM)
    scale = real(word(params, SCALE))
    source = word(params, QUERY) + word(item, 0) * word(params, QUERY_TOKEN)
    source += head * group * word(params, QUERY_HEAD)
    target = mine + row * dims * 4
    for t in range(tokens):
        for g in range(group):
            at = source + t * word(params, QUERY_TOKEN) + g * word(params, QUERY_HEAD)
            if word(params, HALF) != 0:
                _scale(1, 0, at, target, dims // LANES, scale)
            else:
                _scale(0, 0, at, target, dims // LANES, scale)
            target += dims * 4
    rows = tokens * group
    _fill(mine + word(params, SUMS) + row * dims * 4, rows * dims // LANES, np.float32(0))
    _fill(mine + word(params, TOTALS) + row * LINE, rows, np.float32(0))
    for r in range(row, row + rows):
        put(mine + word(params, MAXIMA) + r * 4, np.float32(-np.inf))


@inner
def _soften(params: int, mine: int, row: int, first: int, last: int, blocks: int) -> None:
    """Turns one row's scores of a split into weights; keys outside [first, last) get none."""
    scores = mine + word(params, SCORES) + row * SCORE_BYTES
    if first >= last:
        _fill(scores, blocks, np.float32(0))
        return
    cap = real(word(params, SOFTCAP))
    if cap != 0:
        _cap(scores, blocks, cap)
    _mask(scores, first, last, blocks)
    top = mine + word(params, MAXIMA) + row * 4
    old = get(top)
    new = _exponentiate(scores, blocks, old, mine + word(params, TOTALS) + row * LINE)
    put(top, new)
    if new != old:
        dims = word(params, HEAD_DIM)
        sums = mine + word(params, SUMS) + row * dims * 4
        _scale(0, 0, sums, sums, dims // LANES, _exp2(old - new))


@inner
def _soften_all(params: int, mine: int, item: int, head_rows: int, begin: int, end: int) -> None:
    """All rows of an item over the split of blocks [begin, end)."""
    group, position = word(params, GROUP), word(item, 2)
    for head in range(word(item, 6)):
        for r in range(word(item, 1) * group):
            key = position + r // group
            first = max(begin * 16, key - word(params, WINDOW) + 1) - begin * 16
            last = min(end * 16, key + 1) - begin * 16
            _soften(params, mine, head * head_rows + r, first, last, end - begin)


@inner
def _finish(params: int, mine: int, item: int, head: int, row: int) -> None:
    """Divides by the totals and stores the outputs of one kv head."""
    tokens, group, dims = word(item, 1), word(params, GROUP), word(params, HEAD_DIM)
    target = word(params, OUT) + word(item, 0) * word(params, OUT_TOKEN)
    target += head * group * word(params, OUT_HEAD)
    for t in range(tokens):
        for g in range(group):
            r = row + t * group + g
            sums = mine + word(params, SUMS) + r * dims * 4
            factor = np.float32(1) / _total(mine + word(params, TOTALS) + r * LINE)
            at = target + t * word(params, OUT_TOKEN) + g * word(params, OUT_HEAD)
            if word(params, HALF) != 0:
                _scale(0, 1, sums, at, dims // LANES, factor)
            else:
                _scale(0, 0, sums, at, dims // LANES, factor)


# Two passes over the blocks of a split: scores before the softmax, values after it. Both go block by block
# and within one head by head, as memory lies, and name what comes next so that it is fetched meanwhile:
# with blocks all over memory the processor cannot guess it. Of each head only those rows are computed that
# see something of the block, rounded to whole register tiles.


def _score_pass(m: int, bf16: int) -> Any:
    def score_pass(params: int, mine: int, item: int, head_rows: int, begin: int, end: int) -> None:
        group, dims, position, heads = (
            word(params, GROUP),
            word(params, HEAD_DIM),
            word(item, 2),
            word(item, 6),
        )
        row_bytes = dims * 4
        table = word(params, TABLES) + word(item, 4) * 4
        keys = word(params, LAYER) + word(item, 5) * word(params, HEAD_BYTES)
        for block in range(begin, end):
            first = max(0, block * 16 - position) * group // m * m
            past = min(word(item, 1), block * 16 + 15 + word(params, WINDOW) - position) * group
            at = keys + word32(table, block) * word(params, BLOCK_BYTES)
            for head in range(heads):
                if head + 1 < heads:
                    ahead = at + word(params, HEAD_BYTES)
                elif block + 1 < end:
                    ahead = keys + word32(table, block + 1) * word(params, BLOCK_BYTES)
                else:
                    ahead = keys + word32(table, begin) * word(params, BLOCK_BYTES) + word(params, VALUES)
                scores = mine + word(params, SCORES) + (block - begin) * LINE
                for r in range(head * head_rows + first, head * head_rows + past, m):
                    query = mine + r * row_bytes
                    _score(m, bf16, dims, query, row_bytes, at, ahead, scores + r * SCORE_BYTES)
                at = ahead

    return inner(score_pass, m, bf16)


def _weigh_pass(m: int, bf16: int) -> Any:
    # Few rows take two vectors of values at once, to keep as many sums going as many rows do.
    vectors = 2 if m <= TILE_ROWS // 2 else 1

    def weigh_pass(
        params: int, mine: int, item: int, head_rows: int, begin: int, end: int, ahead_of_all: int
    ) -> None:
        group, dims, position, heads = (
            word(params, GROUP),
            word(params, HEAD_DIM),
            word(item, 2),
            word(item, 6),
        )
        table = word(params, TABLES) + word(item, 4) * 4
        values = word(params, LAYER) + word(item, 5) * word(params, HEAD_BYTES) + word(params, VALUES)
        evenly = dims // (LANES * vectors) * vectors
        for block in range(begin, end):
            first = max(0, block * 16 - position) * group // m * m
            past = min(word(item, 1), block * 16 + 15 + word(params, WINDOW) - position) * group
            count = min(16, word(item, 3) - block * 16)
            at = values + word32(table, block) * word(params, BLOCK_BYTES)
            for head in range(heads):
                if head + 1 < heads:
                    ahead = at + word(params, HEAD_BYTES)
                elif block + 1 < end:
                    ahead = values + word32(table, block + 1) * word(params, BLOCK_BYTES)
                else:
                    ahead = ahead_of_all
                for r in range(head * head_rows + first, head * head_rows + past, m):
                    weights = mine + word(params, SCORES) + r * SCORE_BYTES + (block - begin) * LINE
                    sums = mine + word(params, SUMS) + r * dims * 4
                    _weigh(m, bf16, vectors, 0, evenly, dims, count, weights, at, ahead, sums)
                    if vectors == 2:
                        _weigh(m, bf16, 1, evenly, dims // LANES, dims, count, weights, at, ahead, sums)
                at = ahead

    return inner(weigh_pass, m, bf16)


def _tile(m: int, bf16: int) -> Any:
    """A function that computes one item with register tiles of m rows."""
    score_pass, weigh_pass = _score_pass(m, bf16), _weigh_pass(m, bf16)

    def tile(params: int, mine: int, item: int, ahead: int) -> None:
        position, heads, table = word(item, 2), word(item, 6), word(params, TABLES) + word(item, 4) * 4
        # Rows of the next kv head begin at a whole register tile; what lies between is computed and ignored.
        head_rows = (word(item, 1) * word(params, GROUP) + m - 1) // m * m
        for head in range(heads):
            _begin(params, mine, item, word(item, 5) + head, head * head_rows)
        first = max(0, position - word(params, WINDOW) + 1) // 16
        past = (position + word(item, 1) - 1) // 16 + 1
        begin = first
        while begin < past:
            end = min(past, (begin // SPLIT_BLOCKS + 1) * SPLIT_BLOCKS)
            score_pass(params, mine, item, head_rows, begin, end)
            _soften_all(params, mine, item, head_rows, begin, end)
            follow = ahead
            if end < past:
                follow = word(params, LAYER) + word(item, 5) * word(params, HEAD_BYTES)
                follow += word32(table, end) * word(params, BLOCK_BYTES)
            weigh_pass(params, mine, item, head_rows, begin, end, follow)
            begin = end
        for head in range(heads):
            _finish(params, mine, item, word(item, 5) + head, head * head_rows)

    return inner(tile, m, bf16)


def compile_attention(rows: int, bf16: int) -> int:
    """Machine code for one token's `rows` rows a register tile; the address of void(int64 *words)."""
    small = _tile(rows, bf16)
    large = small if rows == TILE_ROWS else _tile(TILE_ROWS, bf16)

    def attend(params: int) -> None:
        mine = word(params, SCRATCH) + take(params + THREAD * 8) * word(params, SCRATCH_BYTES)
        last = word(params, ITEMS) - 1
        number = take(params + ITEM * 8)
        while number <= last:
            # The next item is taken before this one is done, so that its first block can be on its way.
            following = take(params + ITEM * 8)
            item = word(params, ITEM_LIST) + number * (ITEM_WORDS * 8)
            after = word(params, ITEM_LIST) + min(following, last) * (ITEM_WORDS * 8)
            ahead = word(params, LAYER) + word(after, 5) * word(params, HEAD_BYTES)
            ahead += word32(word(params, TABLES), word(after, 4)) * word(params, BLOCK_BYTES)
            if word(item, 1) == 1:
                small(params, mine, item, ahead)
            else:
                large(params, mine, item, ahead)
            number = following

    return c_function(attend, rows, bf16)
