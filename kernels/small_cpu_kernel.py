"""Small operations between the dense layers on CPU, in numba: one call where torch makes four to ten.

May import numba, and is therefore imported when a kernel is first wanted.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu_compile import c_function
from pagemill.kernels.cpu_vector import LANES, Lanes, get, put, real, take, word
from pagemill.kernels.small_cpu_words import (
    BLOCK_BYTES,
    BLOCKS,
    COS,
    EPS,
    HALF,
    HEAD_BYTES,
    HEAD_DIM,
    HEADS,
    ITEM,
    KV_HEADS,
    LAYER,
    OFFSETS,
    OUT,
    ROWS,
    ROWS_A_TIME,
    SIN,
    VALUES,
    WEIGHT,
    WIDTH,
    X_ROW,
    X,
)

_I64 = ir.IntType(64)
_LINE = LANES * 4


@intrinsic  # type: ignore[untyped-decorator]
def _normalise(typing: Any, x: Any, weight: Any, out: Any, width: Any, eps: Any) -> Any:
    """out = x / rms(x) * weight, float32 [width]."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, weight, out, width, eps = args
        v = Lanes(b)
        vectors = b.udiv(width, _I64(LANES))
        (squares,) = v.variables([v.const(0.0)])
        with cgutils.for_range(b, vectors, intp=_I64) as loop:
            value = v.load(b.add(x, b.mul(loop.index, _I64(_LINE))))
            b.store(v.fma(value, value, b.load(squares)), squares)
        mean = b.fdiv(v.sum(b.load(squares)), b.sitofp(width, ir.FloatType()))
        root = v.call("sqrt", v.splat(b.fadd(mean, eps)))
        factor = b.fdiv(v.const(1.0), root)
        with cgutils.for_range(b, vectors, intp=_I64) as loop:
            at = b.mul(loop.index, _I64(_LINE))
            scaled = b.fmul(v.load(b.add(x, at)), factor)
            v.store(b.fmul(scaled, v.load(b.add(weight, at))), b.add(out, at))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32), emit


def compile_norm() -> int:
    """The address of void(int64 *words)."""

    def norm(params: int) -> None:
        row = take(params + ITEM * 8) * ROWS_A_TIME
        while row < word(params, ROWS):
            for r in range(row, min(row + ROWS_A_TIME, word(params, ROWS))):
                x = word(params, X) + r * word(params, X_ROW)
                out = word(params, OUT) + r * word(params, WIDTH) * 4
                _normalise(x, word(params, WEIGHT), out, word(params, WIDTH), real(word(params, EPS)))
            row = take(params + ITEM * 8) * ROWS_A_TIME

    return c_function(norm)


def compile_rope_write() -> int:
    """The address of void(int64 *words)."""

    def rope_write(params: int) -> None:
        half, dims = word(params, HALF), word(params, HEAD_DIM)
        token = take(params + ITEM * 8)
        while token < word(params, ROWS):
            row = word(params, X) + token * word(params, X_ROW)
            cos = word(params, COS) + token * half * 4
            sin = word(params, SIN) + token * half * 4
            block = word(params, LAYER) + word(word(params, BLOCKS), token) * word(params, BLOCK_BYTES)
            offset = word(word(params, OFFSETS), token)
            for head in range(word(params, HEADS) + word(params, KV_HEADS)):
                at = row + head * dims * 4
                for i in range(half):
                    first, second = get(at + i * 4), get(at + (i + half) * 4)
                    c, s = get(cos + i * 4), get(sin + i * 4)
                    put(at + i * 4, first * c - second * s)
                    put(at + (i + half) * 4, second * c + first * s)
            keys = row + word(params, HEADS) * dims * 4
            values = keys + word(params, KV_HEADS) * dims * 4
            for head in range(word(params, KV_HEADS)):
                place = block + head * word(params, HEAD_BYTES)
                for i in range(dims):
                    put(place + (i * 16 + offset) * 4, get(keys + (head * dims + i) * 4))
                place += word(params, VALUES) + offset * dims * 4
                for i in range(dims):
                    put(place + i * 4, get(values + (head * dims + i) * 4))
            token = take(params + ITEM * 8)

    return c_function(rope_write)
