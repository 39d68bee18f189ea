"""The inner part of int8 linear layers on CPU, in numba: rows to integers, and integers times panels.

The first function rotates a row (Hadamard butterflies within blocks), finds its largest number and rounds it
to integers. The second multiplies a tile of rows with a panel of 16 outputs, all of a row's numbers in one
go, so that sums never leave the registers before they are done.

Without VNNI the fast instruction for bytes, maddubs, adds two products in 16 bits and saturates. So integers
are multiplied as 16-bit words there: two exact products and their sum in 32 bits an instruction, which is
twice what float32 can do. Weights stay bytes in memory and are widened on the way.

May import numba, and is therefore imported when a kernel is first wanted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu_compile import c_function, inner
from pagemill.kernels.cpu_vector import LANES, Lanes, has, number, put, real, take, word
from pagemill.kernels.linear_cpu_words import ADD, GATE, STORE
from pagemill.kernels.linear_int8_cpu_words import (
    BIAS,
    BLOCK,
    GATES,
    GATES_BYTES,
    INTO,
    ITEM,
    ITEM_PANELS,
    ITEM_ROWS,
    ITEMS,
    LINE,
    OFFSETS,
    OUT,
    OUT_ROW,
    PANEL,
    PANEL_LIST,
    PANELS,
    PARTS,
    ROW,
    ROW_SCALES,
    ROWS,
    SCALES,
    SCRATCH,
    SCRATCH_BYTES,
    SMALLEST_ROW,
    SUMS,
    SUMS_BYTES,
    THREAD,
    THREAD_2,
    TILE_ROWS,
    VALUES,
    VALUES_ROW,
    WIDE_TILE_ROWS,
    WIDTH,
    X_ROW,
    X,
)

_F32 = ir.FloatType()
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_VI = ir.VectorType(_I32, LANES)
_VF = ir.VectorType(_F32, LANES)
_INFINITY = 0x7F800000
_SMALLEST = np.float32(SMALLEST_ROW)
_MAGIC = 12582912.0  # 1.5 * 2**23: a small number added to it is rounded to an integer in the low bits
# How many steps of the product are written out in a row.
_UNROLL = 2


def multiplies_bytes() -> bool:
    """Whether this CPU has 512-bit vectors and multiplies bytes without saturating."""
    return has("avx512vnni") and has("avx512bw")


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _rotate(typing: Any, half: Any, vectors: Any, blocks: Any, source: Any, target: Any) -> Any:
    """target = source rotated, in blocks of 16 * vectors numbers; returns the bits of the largest |number|.

    Compared as integers: so a NaN is larger than infinity, and that larger than any number.
    """
    bf16, count = bool(number(half)), number(vectors)

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        blocks, source, target = args[2:]
        v = Lanes(b)
        (largest,) = v.variables([ir.Constant(_VI, [0] * LANES)])
        with cgutils.for_range(b, blocks, intp=_I64) as loop:
            from_, to = (
                b.add(address, b.mul(loop.index, _I64(count * LINE // (2 if small else 1))))
                for address, small in ((source, bf16), (target, False))
            )
            block = [v.load(v.at(from_, i * (LINE // 2 if bf16 else LINE)), bf16) for i in range(count)]
            for i, x in enumerate(_butterflies(v, block)):
                v.store(x, v.at(to, i * LINE))
                bits = b.and_(b.bitcast(x, _VI), ir.Constant(_VI, [0x7FFFFFFF] * LANES))
                old = b.load(largest)
                b.store(b.select(b.icmp_signed(">", bits, old), bits, old), largest)
        reduce = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(_I32, [_VI]), f"llvm.vector.reduce.smax.v{LANES}i32"
        )
        return b.zext(b.call(reduce, [b.load(largest)]), _I64)

    return types.int64(half, vectors, *[types.int64] * 3), emit


def _butterflies(v: Lanes, block: list[Any]) -> list[Any]:
    """Sums and differences at distances 1, 2, 4, ...: within vectors, then between them."""
    undefined = ir.Constant(_VF, ir.Undefined)
    distance = 1
    while distance < LANES:
        order = ir.Constant(_VI, [lane ^ distance for lane in range(LANES)])
        signs = ir.Constant(_VF, [-1.0 if lane & distance else 1.0 for lane in range(LANES)])
        # First plus second in the lower place, first minus second in the upper.
        block = [v.fma(x, signs, v.b.shuffle_vector(x, undefined, order)) for x in block]
        distance *= 2
    distance = 1
    while distance < len(block):
        for i in range(len(block)):
            if not i & distance:
                first, second = block[i], block[i + distance]
                block[i], block[i + distance] = v.b.fadd(first, second), v.b.fsub(first, second)
        distance *= 2
    return block


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _round(typing: Any, as_bytes: Any, vectors: Any, source: Any, factor: Any, target: Any) -> Any:
    """target = source * factor as integers: words, or bytes that are 128 too high."""
    narrow = bool(number(as_bytes))
    kind = ir.VectorType(_I8 if narrow else _I16, LANES)

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        vectors, source, factor, target = args[1:]
        v = Lanes(b)
        with cgutils.for_range(b, vectors, intp=_I64) as loop:
            x = v.load(b.add(source, b.mul(loop.index, _I64(LINE))))
            bits = b.bitcast(b.fadd(b.fmul(x, v.splat(factor)), v.const(_MAGIC)), _VI)
            if narrow:
                bits = b.xor(bits, ir.Constant(_VI, [0x80] * LANES))
            to = b.add(target, b.mul(loop.index, _I64(LANES if narrow else 2 * LANES)))
            b.store(b.trunc(bits, kind), v.pointer(to, kind), align=1)
        return context.get_dummy_value()

    return types.void(as_bytes, types.int64, types.int64, types.float32, types.int64), emit


class _Words:
    """Two 16-bit numbers of each of 16 outputs a step."""

    step_bytes = 2 * PANEL  # of weights, which are bytes in memory
    row_bytes = 4  # of a row's integers

    def __init__(self, v: Lanes) -> None:
        self.v, self.b = v, v.b
        # What one instruction takes: 16 outputs in AVX-512, 8 in AVX2. On others LLVM finds its own way.
        self.x86 = has("avx2")
        self.outputs = 16 if has("avx512bw") or not self.x86 else 8
        self.sums = ir.VectorType(_I32, self.outputs)
        self.pairs = ir.VectorType(_I16, 2 * self.outputs)

    def weights(self, address: Any) -> list[Any]:
        kind = ir.VectorType(_I8, 2 * self.outputs)
        places = [self.v.at(address, i * 2 * self.outputs) for i in range(PANEL // self.outputs)]
        return [self.b.sext(self.b.load(self.v.pointer(p, kind), align=1), self.pairs) for p in places]

    def add(self, total: Any, weights: Any, row: Any) -> Any:
        """total + the products of weights and row, added in pairs."""
        row = self.b.bitcast(row, self.pairs)
        if not self.x86:
            return self._add_anywhere(total, weights, row)
        name = "llvm.x86.avx512.pmaddw.d.512" if self.outputs == 16 else "llvm.x86.avx2.pmadd.wd"
        function = cgutils.get_or_insert_function(
            self.b.module, ir.FunctionType(self.sums, [self.pairs, self.pairs]), name
        )
        return self.b.add(total, self.b.call(function, [weights, row]))

    def _add_anywhere(self, total: Any, weights: Any, row: Any) -> Any:
        wide = ir.VectorType(_I32, 2 * self.outputs)
        product = self.b.mul(self.b.sext(weights, wide), self.b.sext(row, wide))
        undefined = ir.Constant(wide, ir.Undefined)
        for odd in range(2):
            order = ir.Constant(self.sums, list(range(odd, 2 * self.outputs, 2)))
            total = self.b.add(total, self.b.shuffle_vector(product, undefined, order))
        return total


class _Bytes:
    """Four bytes of each of 16 outputs a step: vpdpbusd, unsigned times signed, sums in 32 bits."""

    step_bytes = 4 * PANEL
    row_bytes = 4

    def __init__(self, v: Lanes) -> None:
        self.v, self.b = v, v.b
        self.outputs = PANEL
        self.sums = _VI

    def weights(self, address: Any) -> list[Any]:
        return [self.b.load(self.v.pointer(address, _VI), align=1)]

    def add(self, total: Any, weights: Any, row: Any) -> Any:
        function = cgutils.get_or_insert_function(
            self.b.module, ir.FunctionType(_VI, [_VI] * 3), "llvm.x86.avx512.vpdpbusd.512"
        )
        return self.b.call(function, [total, row, weights])


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _multiply(
    typing: Any, as_bytes: Any, rows: Any, steps: Any, values: Any, stride: Any, panel: Any, sums: Any
) -> Any:
    """sums[rows, 16] = values[rows] @ panel, int32; `stride` is the bytes from row to row of values."""
    narrow, count = bool(number(as_bytes)), number(rows)

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        steps, values, stride, panel, sums = args[2:]
        v = Lanes(b)
        unit: _Words | _Bytes = _Bytes(v) if narrow else _Words(v)
        parts = PANEL // unit.outputs
        at = [b.add(values, b.mul(stride, _I64(i))) for i in range(count)]
        zero = ir.Constant(unit.sums, [0] * unit.outputs)
        totals = v.variables([zero] * (count * parts))
        with cgutils.for_range(b, b.udiv(steps, _I64(_UNROLL)), intp=_I64) as loop:
            for u in range(_UNROLL):
                k = b.add(b.mul(loop.index, _I64(_UNROLL)), _I64(u))
                weights = unit.weights(b.add(panel, b.mul(k, _I64(unit.step_bytes))))
                for i in range(count):
                    place = b.add(at[i], b.mul(k, _I64(unit.row_bytes)))
                    row = _repeat(b, b.load(v.pointer(place, _I32), align=1), unit)
                    for part in range(parts):
                        total = totals[i * parts + part]
                        b.store(unit.add(b.load(total), weights[part], row), total)
        for i, total in enumerate(totals):
            to = v.at(sums, i * unit.outputs * 4)
            b.store(b.load(total), v.pointer(to, unit.sums), align=4)
        return context.get_dummy_value()

    return types.void(as_bytes, rows, *[types.int64] * 5), emit


def _repeat(b: Any, scalar: Any, unit: _Words | _Bytes) -> Any:
    undefined = ir.Constant(unit.sums, ir.Undefined)
    one = b.insert_element(undefined, scalar, _I32(0))
    order = ir.Constant(ir.VectorType(_I32, unit.outputs), [0] * unit.outputs)
    return b.shuffle_vector(one, undefined, order)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _finish(
    typing: Any,
    half: Any,
    as_bytes: Any,
    sums: Any,
    row_scale: Any,
    scales: Any,
    offsets: Any,
    bias: Any,
    into: Any,
    gate: Any,
    out: Any,
) -> Any:
    """y[16] = sums[16] * row scale * scales[16] + bias[16], in this order, and then by `into` to out[16].

    GATE reads the other half's outputs at `gate`.
    """
    bf16, narrow = bool(number(half)), bool(number(as_bytes))

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        sums, row_scale, scales, offsets, bias, into, gate, out = args[2:]
        v = Lanes(b)
        total = b.load(v.pointer(sums, _VI), align=4)
        if narrow:
            total = b.add(total, b.load(v.pointer(offsets, _VI), align=4))
        row = b.load(v.pointer(row_scale, _F32), align=4)
        y = b.fmul(b.fmul(b.sitofp(total, _VF), v.splat(row)), v.load(scales))
        (result,) = v.variables([b.fadd(y, v.load(bias))])
        with b.if_then(b.icmp_signed("==", into, _I64(ADD))):
            b.store(b.fadd(v.load(out, bf16), b.load(result)), result)
        with b.if_then(b.icmp_signed("==", into, _I64(GATE))):
            b.store(b.fmul(v.silu(v.load(gate, bf16)), b.load(result)), result)
        v.store(b.load(result), out, bf16)
        return context.get_dummy_value()

    return types.void(half, as_bytes, *[types.int64] * 8), emit


def _round_rows(kind: int, half: int) -> Any:
    """A function that takes rows and leaves their integers and scales."""

    def rotate_row(params: int, row: int, mine: int) -> Any:
        source, block = word(params, X) + row * word(params, X_ROW), word(params, BLOCK)
        blocks = word(params, WIDTH) // block
        if block == 8 * LANES:
            return _rotate(half, 8, blocks, source, mine)
        if block == 4 * LANES:
            return _rotate(half, 4, blocks, source, mine)
        if block == 2 * LANES:
            return _rotate(half, 2, blocks, source, mine)
        return _rotate(half, 1, blocks, source, mine)

    rotated = inner(rotate_row, half)

    def round_rows(params: int) -> None:
        mine = word(params, SCRATCH) + take(params + THREAD * 8) * word(params, SCRATCH_BYTES)
        row = take(params + ROW * 8)
        while row < word(params, ROWS):
            bits = rotated(params, row, mine)
            largest = real(bits)
            scale, inverse = np.float32(0), np.float32(0)
            if bits >= _INFINITY:
                scale = np.float32(np.nan)
            elif largest >= _SMALLEST:
                scale, inverse = largest / np.float32(127), np.float32(127) / largest
            put(word(params, ROW_SCALES) + row * 4, scale)
            target = word(params, VALUES) + row * word(params, VALUES_ROW)
            _round(kind, word(params, WIDTH) // LANES, mine, inverse, target)
            row = take(params + ROW * 8)

    return round_rows


def _tile(kind: int, half: int, count: int) -> Any:
    """A function that computes `count` rows of a panel."""
    size = 2 if half else 4
    together = 4 if kind else 2

    def tile(
        params: int, row: int, panel: int, into: int, gates: int, out: int, out_row: int, sums: int
    ) -> None:
        stride = word(params, VALUES_ROW)
        _multiply(
            kind,
            count,
            word(params, WIDTH) // together,
            word(params, VALUES) + row * stride,
            stride,
            word(params, PANEL_LIST) + panel * word(params, WIDTH) * PANEL,
            sums,
        )
        scales = word(params, SCALES) + panel * PANEL * 4
        offsets, bias = word(params, OFFSETS) + panel * PANEL * 4, word(params, BIAS) + panel * PANEL * 4
        scale = word(params, ROW_SCALES) + row * 4
        for i in range(count):
            at, gate = sums + i * PANEL * 4, gates + i * PANEL * size
            _finish(half, kind, at, scale + i * 4, scales, offsets, bias, into, gate, out + i * out_row)

    return inner(tile, kind, half, count)


def _multiply_items(kind: int, half: int) -> Any:
    """A function that takes items and computes their outputs."""
    size = 2 if half else 4
    most = WIDE_TILE_ROWS if has("avx512bw") else TILE_ROWS
    large, six, four, two, one = (_tile(kind, half, count) for count in (most, 6, 4, 2, 1))

    def compute_panel(
        params: int, row: int, end: int, panel: int, into: int, gates: int, out: int, out_row: int, sums: int
    ) -> None:
        start = row
        while row + most <= end:
            done = row - start
            at = gates + done * PANEL * size
            large(params, row, panel, into, at, out + done * out_row, out_row, sums)
            row += most
        done = row - start
        at = gates + done * PANEL * size
        if row + 6 <= end:
            six(params, row, panel, into, at, out + done * out_row, out_row, sums)
            row, done, at = row + 6, done + 6, at + 6 * PANEL * size
        if row + 4 <= end:
            four(params, row, panel, into, at, out + done * out_row, out_row, sums)
            row, done, at = row + 4, done + 4, at + 4 * PANEL * size
        if row + 2 <= end:
            two(params, row, panel, into, at, out + done * out_row, out_row, sums)
            row, done, at = row + 2, done + 2, at + 2 * PANEL * size
        if row < end:
            one(params, row, panel, into, at, out + done * out_row, out_row, sums)

    panel_of = inner(compute_panel, kind, half)

    def multiply_items(params: int) -> None:
        thread = take(params + THREAD_2 * 8)
        sums = word(params, SUMS) + thread * SUMS_BYTES
        gates = word(params, GATES) + thread * GATES_BYTES
        into, out_row = word(params, INTO), word(params, OUT_ROW)
        item = take(params + ITEM * 8)
        while item < word(params, ITEMS):
            start = item // word(params, PARTS) * word(params, ITEM_ROWS)
            end = min(start + word(params, ITEM_ROWS), word(params, ROWS))
            first = item % word(params, PARTS) * word(params, ITEM_PANELS)
            last = min(first + word(params, ITEM_PANELS), word(params, PANELS))
            for panel in range(first, last):
                out = word(params, OUT) + start * out_row + panel * PANEL * size
                if into == GATE:
                    panel_of(params, start, end, 2 * panel, STORE, gates, gates, PANEL * size, sums)
                    panel_of(params, start, end, 2 * panel + 1, GATE, gates, out, out_row, sums)
                else:
                    panel_of(params, start, end, panel, into, gates, out, out_row, sums)
            item = take(params + ITEM * 8)

    return multiply_items


def compile_layer(kind: str, bf16: bool) -> tuple[int, int]:
    """Machine code of both passes; addresses of void(int64 *words)."""
    as_bytes, half = int(kind == "bytes"), int(bf16)
    return (
        c_function(_round_rows(as_bytes, half), as_bytes, half),
        c_function(_multiply_items(as_bytes, half), as_bytes, half),
    )
