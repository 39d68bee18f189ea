"""The compiled part of a program of kernels: every thread calls each function, and waits for the others.

May import numba, and is therefore imported when a kernel is first wanted.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu_compile import c_function
from pagemill.kernels.cpu_program_words import ARRIVED, COUNT, LIST, PATIENCE, TEAM_SIZE, YIELD
from pagemill.kernels.cpu_vector import word

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic  # type: ignore[untyped-decorator]
def _call(typing: Any, function: Any, argument: Any) -> Any:
    """Calls void(int64) at an address."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64])
        b.call(b.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def _ask(typing: Any, function: Any) -> Any:
    """What int() at an address returns."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.sext(b.call(b.inttoptr(args[0], ir.FunctionType(_I32, []).as_pointer()), []), _I64)

    return types.int64(types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def _arrive(typing: Any, address: Any) -> Any:
    """Adds 1 to the int64 at an address; whoever sees the sum sees what this thread has written before."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.atomic_rmw("add", b.inttoptr(args[0], _I64.as_pointer()), _I64(1), "acq_rel")
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def _look(typing: Any, address: Any) -> Any:
    """The int64 at an address, as other threads have left it by now; the processor rests a moment before."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if "x86" in str(b.module.triple):
            pause = cgutils.get_or_insert_function(
                b.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            )
            b.call(pause, [])
        return b.load_atomic(b.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), emit


def compile_program() -> int:
    """The address of void(int64 *words)."""

    def program(params: int) -> None:
        threads, calls = _ask(word(params, TEAM_SIZE)), word(params, LIST)
        for i in range(word(params, COUNT)):
            _call(word(calls, 2 * i), word(calls, 2 * i + 1))
            if threads > 1:
                _arrive(params + ARRIVED * 8)
                everybody = (i + 1) * threads
                looks = 0
                while _look(params + ARRIVED * 8) < everybody:
                    looks += 1
                    if looks >= PATIENCE:
                        _ask(word(params, YIELD))

    return c_function(program)
