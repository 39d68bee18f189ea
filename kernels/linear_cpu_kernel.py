"""The inner part of a dense layer on CPU, in numba: panels of 16 outputs against register tiles of rows.

A sum runs over the inputs in chains of a few hundred, each from first to last, and the chains are added in
order. So a
row's bits are its own: neither the rows beside it nor the number of threads changes them.

May import numba, and is therefore imported when a kernel is first wanted.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu_compile import c_function, inner
from pagemill.kernels.cpu_vector import LANES, Lanes, number, stack, take, word
from pagemill.kernels.linear_cpu_words import (
    ADD,
    BIAS,
    CHAIN,
    CHUNK,
    CHUNKS,
    GATE,
    INPUTS,
    INTO,
    ITEM,
    MOST_ROWS,
    OUT,
    OUT_ROW,
    PANELS,
    ROWS,
    STORE,
    UNROLL,
    WEIGHT,
    X_ROW,
    X,
)

_I64 = ir.IntType(64)
_LINE = LANES * 4
# Sums of all rows of an item, and of those that fill its last register tile.
_SUMS_BYTES = (MOST_ROWS + 12) * _LINE
_PAIR_BYTES = 2 * _SUMS_BYTES


def tile_rows() -> int:
    """Rows of the largest register tile: twelve sums of 16 where a register holds 16, else six in pairs."""
    return 12 if binding.get_host_cpu_features().get("avx512f") else 6


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _multiply(
    typing: Any, rows: Any, depth: Any, valid: Any, x: Any, x_row: Any, weight: Any, first: Any, sums: Any
) -> Any:
    """sums[rows, 16] (+)= x[rows, depth] @ weight[depth, 16]; from zero where `first` is not 0.

    Rows from `valid` on repeat the last one: nothing behind a matrix is read.
    """
    count = number(rows)

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        depth, valid, x, x_row, weight, first, sums = args[1:]
        v = Lanes(b)
        last = b.sub(valid, _I64(1))
        places = []
        for i in range(count):
            row = b.select(b.icmp_signed("<", last, _I64(i)), last, _I64(i))
            places.append(b.add(x, b.mul(x_row, row)))
        totals = v.variables([v.const(0.0)] * count)

        def multiply(k: Any) -> None:
            column = v.load(b.add(weight, b.mul(k, _I64(_LINE))))
            for place, total in zip(places, totals, strict=True):
                factor = v.splat(v.load_scalar(b.add(place, b.mul(k, _I64(4)))))
                b.store(v.fma(factor, column, b.load(total)), total)

        with cgutils.for_range(b, b.udiv(depth, _I64(UNROLL)), intp=_I64) as loop:
            for u in range(UNROLL):
                multiply(b.add(b.mul(loop.index, _I64(UNROLL)), _I64(u)))
        for i, total in enumerate(totals):
            at = v.at(sums, i * _LINE)
            with b.if_else(b.icmp_signed("!=", first, _I64(0))) as (then, otherwise):
                with then:
                    v.store(b.load(total), at)
                with otherwise:
                    v.store(b.fadd(v.load(at), b.load(total)), at)
        return context.get_dummy_value()

    return types.void(rows, *[types.int64] * 7), emit


@intrinsic  # type: ignore[untyped-decorator]
def _add_bias(typing: Any, sums: Any, rows: Any, bias: Any) -> Any:
    """sums[rows, 16] += bias[16]."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        sums, rows, bias = args
        v = Lanes(b)
        offset = v.load(bias)
        with cgutils.for_range(b, rows, intp=_I64) as loop:
            at = b.add(sums, b.mul(loop.index, _I64(_LINE)))
            v.store(b.fadd(v.load(at), offset), at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _put_rows(typing: Any, into: Any, sums: Any, other: Any, rows: Any, out: Any, out_row: Any) -> Any:
    """Moves sums[rows, 16] to `out`; GATE multiplies by silu(other) on the way."""
    mode = number(into)

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        sums, other, rows, out, out_row = args[1:]
        v = Lanes(b)
        with cgutils.for_range(b, rows, intp=_I64) as loop:
            shift = b.mul(loop.index, _I64(_LINE))
            y = v.load(b.add(sums, shift))
            to = b.add(out, b.mul(loop.index, out_row))
            if mode == ADD:
                y = b.fadd(v.load(to), y)
            if mode == GATE:
                y = b.fmul(v.silu(v.load(b.add(other, shift))), y)
            v.store(y, to)
        return context.get_dummy_value()

    return types.void(into, *[types.int64] * 5), emit


def _panel(most: int) -> Any:
    def panel(params: int, index: int, row: int, rows: int, sums: int) -> None:
        """sums[rows, 16] = x[row : row + rows] @ panel + bias."""
        inputs = word(params, INPUTS)
        weight = word(params, WEIGHT) + index * inputs * _LINE
        x_row = word(params, X_ROW)
        step = word(params, CHAIN)
        begin = 0
        while begin < inputs:
            depth = min(step, inputs - begin)
            at = weight + begin * _LINE
            x = word(params, X) + row * x_row + begin * 4
            first = 1 if begin == 0 else 0
            r = 0
            while rows - r > 4:
                _multiply(most, depth, rows - r, x + r * x_row, x_row, at, first, sums + r * _LINE)
                r += most
            if rows - r > 2:
                _multiply(4, depth, rows - r, x + r * x_row, x_row, at, first, sums + r * _LINE)
            elif rows - r == 2:
                _multiply(2, depth, 2, x + r * x_row, x_row, at, first, sums + r * _LINE)
            elif rows - r == 1:
                _multiply(1, depth, 1, x + r * x_row, x_row, at, first, sums + r * _LINE)
            begin += step
        if word(params, BIAS) != 0:
            _add_bias(sums, rows, word(params, BIAS) + index * _LINE)

    return inner(panel, most)


def compile_linear() -> int:
    """The address of void(int64 *words)."""
    most = tile_rows()
    panel = _panel(most)

    def linear(params: int) -> None:
        sums = stack(_PAIR_BYTES)
        into, chunks = word(params, INTO), word(params, CHUNKS)
        width = 2 if into == GATE else 1
        count = word(params, PANELS) // width * chunks
        item = take(params + ITEM * 8)
        while item < count:
            index = item // chunks
            row = item % chunks * word(params, CHUNK)
            rows = min(word(params, CHUNK), word(params, ROWS) - row)
            out_row = word(params, OUT_ROW)
            out = word(params, OUT) + row * out_row + index * _LINE
            for i in range(width):
                panel(params, width * index + i, row, rows, sums + i * _SUMS_BYTES)
            if into == GATE:
                _put_rows(GATE, sums + _SUMS_BYTES, sums, rows, out, out_row)
            elif into == ADD:
                _put_rows(ADD, sums, sums, rows, out, out_row)
            else:
                _put_rows(STORE, sums, sums, rows, out, out_row)
            item = take(params + ITEM * 8)

    return c_function(linear, most)
