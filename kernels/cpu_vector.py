"""Vector instructions for kernels written in numba: what C would call intrinsics.

Numba compiles loops well but cannot be told to hold a tile of sums in registers, nor to load 16 numbers at
an address. These intrinsics write that part as LLVM vector code, 16 float32 lanes wide, which LLVM maps to
whatever the CPU has (one AVX-512, two AVX or four NEON registers). The control flow around them stays
Python. Memory is named by addresses (int64), so that a kernel takes one pointer to a list of words.

Sums are chains of fused multiply-adds in a fixed order: how many rows are computed together changes no bit.

Knows LLVM and numba only; imported when a kernel is compiled, never before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
LOG2E = 1.4426950408889634

_F32 = ir.FloatType()
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_VF = ir.VectorType(_F32, LANES)
_VI = ir.VectorType(_I32, LANES)


def _exp2_coefficients() -> list[float]:
    """c with 2**r = 1 + r * (c0 + c1 r + ... + c5 r**5) on [-1/2, 1/2] to 4e-9, fitted at Chebyshev nodes.

    The constant term stays exactly 1: a weight of 2**0 and a rescaling by 2**0 must change nothing.
    """
    nodes = np.cos((np.arange(64) + 0.5) * np.pi / 64) / 2
    slope = np.expm1(nodes * np.log(2)) / nodes
    fit = np.polynomial.Polynomial.fit(nodes, slope, 5).convert()
    return [float(np.float32(c)) for c in fit.coef]


_EXP2 = _exp2_coefficients()


def has(feature: str) -> bool:
    """Whether this CPU has what LLVM calls by that name."""
    return bool(binding.get_host_cpu_features().get(feature, False))


def multiplies_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 by itself."""
    return has("avx512bf16")


def holds_many_sums() -> bool:
    """Whether there are 32 registers of 16 numbers, and not 16 of 8: room for a tile of 24 sums."""
    return has("avx512f")


class Lanes:
    """Emits vector code at the builder's place. A value is 16 float32 unless said otherwise."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def const(self, x: float) -> Any:
        return ir.Constant(_VF, [float(np.float32(x))] * LANES)

    def splat(self, scalar: Any) -> Any:
        kind = ir.VectorType(scalar.type, LANES)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, _I32(0))
        return self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(_VI, [0] * LANES))

    def pointer(self, address: Any, kind: Any) -> Any:
        return self.b.inttoptr(address, kind.as_pointer())

    def at(self, address: Any, bytes_: int) -> Any:
        return self.b.add(address, _I64(bytes_))

    def load(self, address: Any, bf16: bool = False) -> Any:
        """16 numbers; bfloat16 is the upper half of a float32."""
        if not bf16:
            return self.b.load(self.pointer(address, _VF), align=4)
        half = self.b.load(self.pointer(address, ir.VectorType(_I16, LANES)), align=2)
        return self.widened(half)

    def store(self, value: Any, address: Any, bf16: bool = False) -> None:
        if not bf16:
            self.b.store(value, self.pointer(address, _VF), align=4)
            return
        half = ir.VectorType(_I16, LANES)
        self.b.store(self.b.trunc(self._upper_half(value), half), self.pointer(address, half), align=2)

    def load_two(self, low: Any, high: Any, bf16: bool) -> Any:
        """8 numbers at `low` and 8 at `high`."""
        part = ir.VectorType(_I16 if bf16 else _F32, LANES // 2)
        halves = [self.b.load(self.pointer(at, part), align=2) for at in (low, high)]
        both = self.b.shuffle_vector(*halves, ir.Constant(_VI, list(range(LANES))))
        return self.widened(both) if bf16 else both

    def store_two(self, value: Any, low: Any, high: Any, bf16: bool) -> None:
        """The first 8 of 16 numbers to `low`, the others to `high`."""
        if bf16:
            value = self.b.trunc(self._upper_half(value), ir.VectorType(_I16, LANES))
        order = ir.VectorType(_I32, LANES // 2)
        for start, at in ((0, low), (LANES // 2, high)):
            lanes = ir.Constant(order, list(range(start, start + LANES // 2)))
            part = self.b.shuffle_vector(value, value, lanes)
            self.b.store(part, self.pointer(at, part.type), align=2)

    def rounded(self, value: Any) -> Any:
        """The nearest numbers that bfloat16 has, as float32."""
        return self.b.bitcast(self.b.shl(self._upper_half(value), self._ints(16)), _VF)

    def _upper_half(self, value: Any) -> Any:
        """bfloat16's bits, in the lower halves of 32."""
        # Round to nearest even; the carry may turn the largest number into infinity, as it should. A NaN
        # with all bits set would become -0, so a NaN is made anew.
        bits = self.b.bitcast(value, _VI)
        odd = self.b.and_(self.b.lshr(bits, self._ints(16)), self._ints(1))
        rounded = self.b.lshr(self.b.add(bits, self.b.add(odd, self._ints(0x7FFF))), self._ints(16))
        broken = self.b.fcmp_unordered("uno", value, value)
        return self.b.select(broken, self._ints(0x7FC0), rounded)

    def _ints(self, x: int) -> Any:
        return ir.Constant(_VI, [x] * LANES)

    def load_scalar(self, address: Any) -> Any:
        return self.b.load(self.pointer(address, _F32), align=4)

    def call(self, name: str, *args: Any) -> Any:
        kind = args[0].type
        function = cgutils.get_or_insert_function(
            self.b.module, ir.FunctionType(kind, [kind] * len(args)), f"llvm.{name}.v{LANES}f32"
        )
        return self.b.call(function, args)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call("fma", a, b, c)

    def dot(self, total: Any, pairs: Any, others: Any) -> Any:
        """total + the two products of each lane's pair of bfloat16, where multiplies_bf16.

        Numbers too small for a full exponent count as zero.
        """
        # LLVM's own form takes vectors of bfloat16, which llvmlite cannot name; it translates this one.
        return self._instruction("avx512bf16.dpbf16ps.512", _VF, total, pairs, others)

    def narrowed(self, value: Any) -> Any:
        """bfloat16's bits, 16 bits each, by the instruction of such a CPU; rounds as `store` does."""
        return self._instruction("avx512bf16.cvtneps2bf16.512", ir.VectorType(_I16, LANES), value)

    def _instruction(self, name: str, kind: Any, *args: Any) -> Any:
        signature = ir.FunctionType(kind, [arg.type for arg in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, signature, f"llvm.x86.{name}"), args)

    def load_pairs(self, address: Any) -> Any:
        """16 pairs of bfloat16 that lie together."""
        return self.b.load(self.pointer(address, _VI), align=2)

    def store_pairs(self, value: Any, address: Any) -> None:
        """Any vector, as its bits lie."""
        self.b.store(value, self.pointer(address, value.type), align=2)

    def widened(self, half: Any) -> Any:
        """float32 of bfloat16's bits, 16 bits each."""
        return self.b.bitcast(self.b.shl(self.b.zext(half, _VI), self._ints(16)), _VF)

    def interleave(self, low: Any, high: Any | None) -> Any:
        """Pairs of 16 bfloat16 at `low` and 16 at `high`, or zeros."""

        def load(address: Any) -> Any:
            half = ir.VectorType(_I16, LANES)
            return self.b.zext(self.b.load(self.pointer(address, half), align=2), _VI)

        pairs = load(low)
        return pairs if high is None else self.b.or_(pairs, self.b.shl(load(high), self._ints(16)))

    def splat_pair(self, address: Any) -> Any:
        """The pair of bfloat16 at an address, in all lanes."""
        return self.splat(self.b.load(self.pointer(address, _I32), align=2))

    def max(self, a: Any, b: Any) -> Any:
        """NaN in one argument gives the other."""
        return self.call("maxnum", a, b)

    def exp2(self, x: Any) -> Any:
        """2**x for x <= 127, 0 below -126.5; NaN stays NaN."""
        low = self.const(-127.0)
        x = self.b.select(self.b.fcmp_ordered("olt", x, low), low, x)
        fraction, power = self._split_exponent(x)
        return self.fma(self.b.fmul(fraction, self._exp2_slope(fraction)), power, power)

    def _split_exponent(self, x: Any) -> tuple[Any, Any]:
        """x = n + fraction with |fraction| <= 1/2; returns fraction and 2**n."""
        # Adding 1.5 * 2**23 leaves n, rounded, in the low bits of the sum.
        magic = self.const(12582912.0)
        shifted = self.b.fadd(x, magic)
        fraction = self.b.fsub(x, self.b.fsub(shifted, magic))
        exponent = self.b.shl(self.b.bitcast(shifted, _VI), self._ints(23))
        return fraction, self.b.bitcast(self.b.add(exponent, self._ints(0x3F800000)), _VF)

    def _exp2_slope(self, fraction: Any) -> Any:
        value = self.const(_EXP2[-1])
        for c in reversed(_EXP2[:-1]):
            value = self.fma(value, fraction, self.const(c))
        return value

    def tanh(self, x: Any) -> Any:
        """By way of e**2x - 1, which keeps small arguments exact to a few units in the last place."""
        limit = self.const(20.0)
        y = self.b.fmul(x, self.const(2 * LOG2E))
        y = self.b.select(self.b.fcmp_ordered("ogt", y, limit), limit, y)
        y = self.b.select(self.b.fcmp_ordered("olt", y, self.b.fneg(limit)), self.b.fneg(limit), y)
        fraction, power = self._split_exponent(y)
        less_one = self.fma(
            self.b.fmul(fraction, self._exp2_slope(fraction)), power, self.b.fsub(power, self.const(1.0))
        )
        return self.b.fdiv(less_one, self.b.fadd(less_one, self.const(2.0)))

    def silu(self, x: Any) -> Any:
        """x / (1 + e**-x). Where e**-x would overflow it is held at 2**127, and the quotient is 0 or near."""
        y = self.b.fmul(x, self.const(-LOG2E))
        limit = self.const(127.0)
        y = self.b.select(self.b.fcmp_ordered("ogt", y, limit), limit, y)
        return self.b.fdiv(x, self.b.fadd(self.exp2(y), self.const(1.0)))

    def largest(self, x: Any) -> Any:
        return self._reduce("fmax", [_VF], x)

    def sum(self, x: Any) -> Any:
        """Sum of the lanes, by halves."""
        while x.type.count > 1:
            half = x.type.count // 2
            undefined = ir.Constant(x.type, ir.Undefined)
            order = ir.VectorType(_I32, half)
            low = self.b.shuffle_vector(x, undefined, ir.Constant(order, list(range(half))))
            high = self.b.shuffle_vector(x, undefined, ir.Constant(order, list(range(half, 2 * half))))
            x = self.b.fadd(low, high)
        return self.b.extract_element(x, _I32(0))

    def _reduce(self, name: str, kinds: list[Any], *args: Any) -> Any:
        function = cgutils.get_or_insert_function(
            self.b.module, ir.FunctionType(_F32, kinds), f"llvm.vector.reduce.{name}.v{LANES}f32"
        )
        return self.b.call(function, args)

    def prefetch(self, address: Any) -> None:
        """To the second cache: the first is full of what is computed (64 rows of 150 tokens: 6 % faster)."""
        pointer = self.pointer(address, _I8)
        function = cgutils.get_or_insert_function(
            self.b.module,
            ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32]),
            "llvm.prefetch.p0",
        )
        self.b.call(function, [pointer, _I32(0), _I32(2), _I32(1)])

    def variables(self, values: list[Any]) -> list[Any]:
        """Places for values that a loop changes; LLVM keeps them in registers."""
        places = []
        for value in values:
            place = cgutils.alloca_once(self.b, value.type)
            self.b.store(value, place)
            places.append(place)
        return places


def number(kind: Any) -> int:
    """The value of a literal's type; an intrinsic unrolls by such numbers."""
    assert isinstance(kind, types.IntegerLiteral), kind
    return int(kind.literal_value)


# --- Words of memory ---------------------------------------------------------------------------------


@intrinsic  # type: ignore[untyped-decorator]
def word(typing: Any, address: Any, index: Any) -> Any:
    """The int64 at address[index]."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load(b.gep(b.inttoptr(args[0], _I64.as_pointer()), [args[1]]))

    return types.int64(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def word32(typing: Any, address: Any, index: Any) -> Any:
    """The int32 at address[index], as int64."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.sext(b.load(b.gep(b.inttoptr(args[0], _I32.as_pointer()), [args[1]])), _I64)

    return types.int64(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def get(typing: Any, address: Any) -> Any:
    """The float32 at an address."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return Lanes(b).load_scalar(args[0])

    return types.float32(types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def put(typing: Any, address: Any, value: Any) -> Any:
    """Stores a float32 at an address."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[1], b.inttoptr(args[0], _F32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), emit


@intrinsic  # type: ignore[untyped-decorator]
def real(typing: Any, bits: Any) -> Any:
    """The float32 whose bits are the low half of a word."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.bitcast(b.trunc(args[0], _I32), _F32)

    return types.float32(types.int64), emit


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def stack(typing: Any, size: Any) -> Any:
    """The address of so many bytes (a literal) on the stack, at a cache line."""
    count = number(size)

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        # cgutils.alloca_once would also zero it, byte by byte, and keep LLVM busy for ten seconds.
        with b.goto_entry_block():
            place = b.alloca(ir.ArrayType(_I8, count))
        place.align = 64
        return b.ptrtoint(place, _I64)

    return types.int64(size), emit


@intrinsic  # type: ignore[untyped-decorator]
def take(typing: Any, address: Any) -> Any:
    """Adds 1 to the int64 at an address, as one step among threads; returns what was there."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], _I64.as_pointer()), _I64(1), "monotonic")

    return types.int64(types.int64), emit
