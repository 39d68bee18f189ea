"""The inner part of a dense layer on CPU, in numba: panels of 16 outputs against register tiles of rows.

A sum runs over the inputs in chains of a few hundred, each from first to last, and the chains are added in
order. So a row's bits are its own: neither the rows beside it nor the number of threads changes them.

In bfloat16 two neighbouring inputs lie in the place of one in float32, and everything else is the same: where
a CPU has it, one instruction (vdpbf16ps) adds both products to a float32 sum; elsewhere two do, on numbers
widened in a register. Sums are float32 until they are stored.

May import numba, and is therefore imported when a kernel is first wanted.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu_compile import c_function, inner
from pagemill.kernels.cpu_kinds import FLOAT32, PAIRS, WIDENED
from pagemill.kernels.cpu_vector import LANES, Lanes, holds_many_sums, number, stack, take, word
from pagemill.kernels.linear_cpu_words import (
    ADD,
    BIAS,
    CHAIN,
    CHUNK,
    CHUNKS,
    GATE,
    INTO,
    ITEM,
    LINES,
    MOST_PANELS,
    MOST_ROWS,
    OUT,
    OUT_ROW,
    PANELS,
    ROWS,
    STORE,
    TILE_ROWS,
    UNROLL,
    WEIGHT,
    X_ROW,
    X,
)

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_VF = ir.VectorType(ir.FloatType(), LANES)
_VI = ir.VectorType(_I32, LANES)
_LINE = LANES * 4
# Sums of a panel for all rows of an item, and for those that fill its last register tile.
_SUMS_BYTES = (MOST_ROWS + TILE_ROWS) * _LINE


def tile_panels() -> int:
    """Panels of a register tile: 24 sums where registers hold so many, else 6."""
    return MOST_PANELS if holds_many_sums() else 1


class _Float32:
    """One input of each of 16 outputs a line."""

    def __init__(self, v: Lanes) -> None:
        self.v = v

    def weights(self, address: Any) -> Any:
        return self.v.load(address)

    def factor(self, place: Any) -> Any:
        """The row's numbers at `place`, ready to multiply a line."""
        return self.v.splat(self.v.load_scalar(place))

    def add(self, total: Any, weights: Any, factor: Any) -> Any:
        return self.v.fma(factor, weights, total)


class _Widened:
    """Two inputs of each of 16 outputs a line, in bfloat16, widened: as float32 each is the upper half."""

    def __init__(self, v: Lanes) -> None:
        self.v = v

    def weights(self, address: Any) -> Any:
        return self._halves(self.v.load_pairs(address))

    def factor(self, place: Any) -> Any:
        return self._halves(self.v.splat_pair(place))

    def add(self, total: Any, weights: Any, factor: Any) -> Any:
        for one, column in zip(factor, weights, strict=True):
            total = self.v.fma(one, column, total)
        return total

    def _halves(self, pair: Any) -> tuple[Any, Any]:
        b = self.v.b
        low = b.shl(pair, ir.Constant(_VI, [16] * LANES))
        high = b.and_(pair, ir.Constant(_VI, [0xFFFF0000] * LANES))
        return b.bitcast(low, _VF), b.bitcast(high, _VF)


class _Pairs:
    """The same by the instruction for it."""

    def __init__(self, v: Lanes) -> None:
        self.v = v

    def weights(self, address: Any) -> Any:
        return self.v.load_pairs(address)

    def factor(self, place: Any) -> Any:
        return self.v.splat_pair(place)

    def add(self, total: Any, weights: Any, factor: Any) -> Any:
        return self.v.dot(total, factor, weights)


_UNITS: dict[int, type[_Float32 | _Widened | _Pairs]] = {FLOAT32: _Float32, WIDENED: _Widened, PAIRS: _Pairs}


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _multiply(
    typing: Any,
    kind: Any,
    panels: Any,
    rows: Any,
    depth: Any,
    valid: Any,
    x: Any,
    x_row: Any,
    weight: Any,
    panel_bytes: Any,
    first: Any,
    sums: Any,
) -> Any:
    """sums[panels][rows, 16] (+)= x[rows] @ weight, over `depth` lines; from zero where `first` is not 0.

    Rows from `valid` on repeat the last one: nothing behind a matrix is read.
    """
    wide, count, chosen = number(panels), number(rows), _UNITS[number(kind)]

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        depth, valid, x, x_row, weight, panel_bytes, first, sums = args[3:]
        v = Lanes(b)
        last = b.sub(valid, _I64(1))
        places = []
        for i in range(count):
            row = b.select(b.icmp_signed("<", last, _I64(i)), last, _I64(i))
            places.append(b.add(x, b.mul(x_row, row)))
        columns = [b.add(weight, b.mul(panel_bytes, _I64(p))) for p in range(wide)]
        totals = [v.variables([v.const(0.0)] * wide) for _ in range(count)]
        unit = chosen(v)

        def multiply(k: Any) -> None:
            lines = [unit.weights(b.add(column, b.mul(k, _I64(_LINE)))) for column in columns]
            for place, sums_of_row in zip(places, totals, strict=True):
                factor = unit.factor(b.add(place, b.mul(k, _I64(4))))
                for line, total in zip(lines, sums_of_row, strict=True):
                    b.store(unit.add(b.load(total), line, factor), total)

        with cgutils.for_range(b, b.udiv(depth, _I64(UNROLL)), intp=_I64) as loop:
            for u in range(UNROLL):
                multiply(b.add(b.mul(loop.index, _I64(UNROLL)), _I64(u)))
        for i, sums_of_row in enumerate(totals):
            for p, total in enumerate(sums_of_row):
                at = v.at(sums, p * _SUMS_BYTES + i * _LINE)
                with b.if_else(b.icmp_signed("!=", first, _I64(0))) as (then, otherwise):
                    with then:
                        v.store(b.load(total), at)
                    with otherwise:
                        v.store(b.fadd(v.load(at), b.load(total)), at)
        return context.get_dummy_value()

    return types.void(kind, panels, rows, *[types.int64] * 8), emit


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
def _put_rows(
    typing: Any, into: Any, half: Any, sums: Any, other: Any, rows: Any, out: Any, out_row: Any
) -> Any:
    """Moves sums[rows, 16] to `out`, as bfloat16 if `half`; GATE multiplies by silu(other) on the way."""
    mode, bf16 = number(into), bool(number(half))

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        sums, other, rows, out, out_row = args[2:]
        v = Lanes(b)
        with cgutils.for_range(b, rows, intp=_I64) as loop:
            shift = b.mul(loop.index, _I64(_LINE))
            y = v.load(b.add(sums, shift))
            to = b.add(out, b.mul(loop.index, out_row))
            if mode == ADD:
                y = b.fadd(v.load(to, bf16), y)
            if mode == GATE:
                y = b.fmul(v.silu(v.load(b.add(other, shift))), y)
            v.store(y, to, bf16)
        return context.get_dummy_value()

    return types.void(into, half, *[types.int64] * 5), emit


def _panels(kind: int, wide: int) -> Any:
    def panels(params: int, index: int, row: int, rows: int, sums: int) -> None:
        """sums[wide][rows, 16] = x[row : row + rows] @ the panels from `index` on + bias."""
        lines = word(params, LINES)
        size = lines * _LINE
        weight = word(params, WEIGHT) + index * size
        x_row = word(params, X_ROW)
        step = word(params, CHAIN)
        begin = 0
        while begin < lines:
            depth = min(step, lines - begin)
            at = weight + begin * _LINE
            x = word(params, X) + row * x_row + begin * 4
            first = 1 if begin == 0 else 0
            r = 0
            while rows - r > 4:
                to = sums + r * _LINE
                _multiply(kind, wide, TILE_ROWS, depth, rows - r, x + r * x_row, x_row, at, size, first, to)
                r += TILE_ROWS
            to = sums + r * _LINE
            if rows - r > 2:
                _multiply(kind, wide, 4, depth, rows - r, x + r * x_row, x_row, at, size, first, to)
            elif rows - r == 2:
                _multiply(kind, wide, 2, depth, 2, x + r * x_row, x_row, at, size, first, to)
            elif rows - r == 1:
                _multiply(kind, wide, 1, depth, 1, x + r * x_row, x_row, at, size, first, to)
            begin += step
        if word(params, BIAS) != 0:
            for p in range(wide):
                _add_bias(sums + p * _SUMS_BYTES, rows, word(params, BIAS) + (index + p) * _LINE)

    return inner(panels, kind, wide)


def compile_linear(kind: int, half: int) -> int:
    """The address of void(int64 *words). kind: FLOAT32, WIDENED or PAIRS; half: outputs are bfloat16."""
    wide = tile_panels()
    several, one = _panels(kind, wide), _panels(kind, 1)
    size = LANES * (2 if half else 4)
    most = max(wide, 2)  # panels of an item; of a gate there are two at least
    bytes_ = most * _SUMS_BYTES

    def linear(params: int) -> None:
        sums = stack(bytes_)
        into, chunks, panels = word(params, INTO), word(params, CHUNKS), word(params, PANELS)
        together = most if into == GATE else wide
        count = -(-panels // together) * chunks
        item = take(params + ITEM * 8)
        while item < count:
            index = item // chunks * together
            row = item % chunks * word(params, CHUNK)
            rows = min(word(params, CHUNK), word(params, ROWS) - row)
            out_row = word(params, OUT_ROW)
            found = min(together, panels - index)
            if found == wide:
                several(params, index, row, rows, sums)
            else:
                for p in range(found):
                    one(params, index + p, row, rows, sums + p * _SUMS_BYTES)
            out = word(params, OUT) + row * out_row
            if into == GATE:
                for p in range(0, found, 2):
                    gates = sums + p * _SUMS_BYTES
                    to = out + (index + p) // 2 * size
                    _put_rows(GATE, half, gates + _SUMS_BYTES, gates, rows, to, out_row)
            else:
                for p in range(found):
                    mine, to = sums + p * _SUMS_BYTES, out + (index + p) * size
                    if into == ADD:
                        _put_rows(ADD, half, mine, mine, rows, to, out_row)
                    else:
                        _put_rows(STORE, half, mine, mine, rows, to, out_row)
            item = take(params + ITEM * 8)

    return c_function(linear, kind, half, wide)
