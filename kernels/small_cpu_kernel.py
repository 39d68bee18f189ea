"""Small operations between the dense layers on CPU, in numba: one call where torch makes four to ten.

In bfloat16 everything is computed in float32, and rounded wherever the forms in torch round.

May import numba, and is therefore imported when a kernel is first wanted.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu_compile import c_function, inner
from pagemill.kernels.cpu_vector import LANES, Lanes, number, real, take, word
from pagemill.kernels.small_cpu_words import (
    BLOCK_BYTES,
    BLOCKS,
    COS,
    EPS,
    HEAD_BYTES,
    HEAD_DIM,
    HEADS,
    ITEM,
    KV_HEADS,
    LAYER,
    NORM,
    NORM_EPS,
    OFFSETS,
    OUT,
    PAIRS,
    ROWS,
    ROWS_A_TIME,
    SIN,
    TOGETHER,
    VALUES,
    WEIGHT,
    WIDTH,
    X_ROW,
    X,
)

_F32, _I16, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(64)
_LINE = LANES * 4


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _normalise(
    typing: Any, half: Any, half_weight: Any, x: Any, weight: Any, out: Any, width: Any, eps: Any
) -> Any:
    """out = x / rms(x) * weight, [width]."""
    bf16, bf16_weight = bool(number(half)), bool(number(half_weight))

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, weight, out, width, eps = args[2:]
        v = Lanes(b)
        vectors = b.udiv(width, _I64(LANES))

        def at(base: Any, index: Any, small: bool) -> Any:
            return b.add(base, b.mul(index, _I64(_LINE // 2 if small else _LINE)))

        (squares,) = v.variables([v.const(0.0)])
        with cgutils.for_range(b, vectors, intp=_I64) as loop:
            value = v.load(at(x, loop.index, bf16), bf16)
            b.store(v.fma(value, value, b.load(squares)), squares)
        mean = b.fdiv(v.sum(b.load(squares)), b.sitofp(width, _F32))
        root = v.call("sqrt", v.splat(b.fadd(mean, eps)))
        factor = b.fdiv(v.const(1.0), root)
        with cgutils.for_range(b, vectors, intp=_I64) as loop:
            scaled = b.fmul(v.load(at(x, loop.index, bf16), bf16), factor)
            if bf16_weight:
                scaled = v.rounded(scaled)
            scaled = b.fmul(scaled, v.load(at(weight, loop.index, bf16_weight), bf16_weight))
            v.store(scaled, at(out, loop.index, bf16), bf16)
        return context.get_dummy_value()

    return types.void(half, half_weight, *[types.int64] * 4, types.float32), emit


def compile_norm(half: int, half_weight: int) -> int:
    """The address of void(int64 *words). half, half_weight: x and out, and the weight, are bfloat16."""
    size = 2 if half else 4

    def norm(params: int) -> None:
        row = take(params + ITEM * 8) * ROWS_A_TIME
        while row < word(params, ROWS):
            for r in range(row, min(row + ROWS_A_TIME, word(params, ROWS))):
                x = word(params, X) + r * word(params, X_ROW)
                out = word(params, OUT) + r * word(params, WIDTH) * size
                eps = real(word(params, EPS))
                _normalise(half, half_weight, x, word(params, WEIGHT), out, word(params, WIDTH), eps)
            row = take(params + ITEM * 8) * ROWS_A_TIME

    return c_function(norm, half, half_weight)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _turn(typing: Any, half: Any, first: Any, second: Any, cos: Any, sin: Any) -> Any:
    """Rotates 16 pairs in place: numbers at `first`, and those they pair with at `second`."""
    bf16 = bool(number(half))

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        v = Lanes(b)
        x, y, c, s = (v.load(address, bf16) for address in args[1:])
        v.store(b.fsub(_product(v, bf16, x, c), _product(v, bf16, y, s)), args[1], bf16)
        v.store(b.fadd(_product(v, bf16, y, c), _product(v, bf16, x, s)), args[2], bf16)
        return context.get_dummy_value()

    return types.void(half, *[types.int64] * 4), emit


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _turn_eight(typing: Any, half: Any, first: Any, second: Any, cos: Any, sin: Any) -> Any:
    """The same for 8 pairs, both halves in one vector."""
    bf16 = bool(number(half))

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        v = Lanes(b)
        first, second, cos, sin = args[1:]
        x, y = v.load_two(first, second, bf16), v.load_two(second, first, bf16)
        c, s = v.load_two(cos, cos, bf16), v.load_two(sin, sin, bf16)
        turned = _product(v, bf16, y, s)
        signs = ir.Constant(c.type, [-1.0] * (LANES // 2) + [1.0] * (LANES // 2))
        v.store_two(b.fadd(_product(v, bf16, x, c), b.fmul(turned, signs)), first, second, bf16)
        return context.get_dummy_value()

    return types.void(half, *[types.int64] * 4), emit


def _product(v: Lanes, bf16: bool, left: Any, right: Any) -> Any:
    # Never fused with the sum: the form in torch rounds it, in float32 too.
    product = v.b.fmul(left, right)
    return v.rounded(product) if bf16 else product


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _move(typing: Any, count: Any, half: Any, source: Any, target: Any) -> Any:
    """Copies `count` neighbouring numbers."""
    kind = ir.VectorType(_I16 if number(half) else ir.IntType(32), number(count))

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        v = Lanes(b)
        value = b.load(v.pointer(args[2], kind), align=2)
        b.store(value, v.pointer(args[3], kind), align=2)
        return context.get_dummy_value()

    return types.void(count, half, types.int64, types.int64), emit


def _write(half: int) -> Any:
    size = 2 if half else 4

    def write(params: int, token: int, keys: int) -> None:
        """Puts a token's keys and the values behind them into its block."""
        dims = word(params, HEAD_DIM)
        values = keys + word(params, KV_HEADS) * dims * size
        block = word(params, LAYER) + word(word(params, BLOCKS), token) * word(params, BLOCK_BYTES)
        offset = word(word(params, OFFSETS), token)
        for head in range(word(params, KV_HEADS)):
            place = block + head * word(params, HEAD_BYTES)
            mine = head * dims * size
            for i in range(dims):
                _move(1, half, keys + mine + i * size, place + (i * 16 + offset) * size)
            place += word(params, VALUES) + offset * dims * size
            for i in range(0, dims, LANES):
                _move(LANES, half, values + mine + i * size, place + i * size)

    return inner(write, half)


def compile_rope_write(half: int, half_norm: int) -> int:
    """The address of void(int64 *words). half: numbers are bfloat16; half_norm: the norm's weights are."""
    size, norm_size = 2 if half else 4, 2 if half_norm else 4
    write = _write(half)

    def rotate(params: int, token: int) -> None:
        pairs, dims = word(params, PAIRS), word(params, HEAD_DIM)
        row = word(params, X) + token * word(params, X_ROW)
        cos = word(params, COS) + token * pairs * size
        sin = word(params, SIN) + token * pairs * size
        for head in range(word(params, HEADS) + word(params, KV_HEADS)):
            first = row + head * dims * size
            second = first + pairs * size
            if word(params, NORM) != 0:
                weight = word(params, NORM) + head * dims * norm_size
                _normalise(half, half_norm, first, weight, first, dims, real(word(params, NORM_EPS)))
            whole = pairs // LANES * LANES * size
            for i in range(0, whole, LANES * size):
                _turn(half, first + i, second + i, cos + i, sin + i)
            if whole != pairs * size:
                _turn_eight(half, first + whole, second + whole, cos + whole, sin + whole)
        write(params, token, row + word(params, HEADS) * dims * size)

    one = inner(rotate, half, half_norm)

    def rope_write(params: int) -> None:
        together = word(params, TOGETHER)
        token = take(params + ITEM * 8) * together
        while token < word(params, ROWS):
            for t in range(token, min(token + together, word(params, ROWS))):
                one(params, t)
            token = take(params + ITEM * 8) * together

    return c_function(rope_write, half, half_norm)
