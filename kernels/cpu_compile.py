"""Compiles numba functions to C functions and keeps the machine code on disk.

Numba's own cache does not see that a function it calls was changed in another file, and takes a function
made by another function for a new one at every start. Here the key is the text of all kernel sources.

May import numba, and is therefore imported when a kernel is first wanted.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc

# Machine code goes away with the object that compiled it.
_alive: list[Any] = []


def inner(function: Callable[..., Any], *variant: int) -> Any:
    """Compiles a function that kernels call; may be a decorator where there are no variants of it.

    variant: the numbers that `function` was made from, which tell it from others of the same text.
    """
    _name(function, variant)
    # error_model: a division by zero gives infinity, as in C, and needs no Python exception.
    compiler = numba.njit(
        error_model="numpy", boundscheck=False, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
    )
    return compiler(function)


def c_function(function: Callable[[int], None], *variant: int) -> int:
    """The address of `function` as C's void(int64): the argument is the address of its words."""
    _name(function, variant)
    options = {"error_model": "numpy", "boundscheck": False}
    compiled: Any = CFunc(function, ((types.int64,), types.void), locals={}, options=options)
    # Where neither the folder of the sources nor one of the user's can be written, compile at each start.
    with contextlib.suppress(RuntimeError, OSError):
        compiled._cache = _KernelCache(function, variant)
    compiled.compile()
    _alive.append(compiled)
    return int(compiled.address)


def _name(function: Callable[..., Any], variant: tuple[int, ...]) -> None:
    # Numba tells functions of one name apart by counting them within a process. Code from disk was counted
    # in another, and would be linked with whatever has that number here: variants need names of their own.
    function.__qualname__ = "_".join([function.__qualname__, *map(str, variant)])


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """Numba's files and locks under our key. Trouble with the disk costs a compilation and no more."""

    def __init__(self, function: Callable[[int], None], variant: tuple[int, ...]) -> None:
        super().__init__(function)
        self.variant = variant

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        # The magic tuple names the CPU and what it can do: a home folder may be shared by unlike machines.
        return (signature, codegen.magic_tuple(), (_digest_of_sources(), self.variant))

    def load_overload(self, signature: Any, target: Any) -> Any:
        try:
            return super().load_overload(signature, target)
        except Exception:  # whatever a damaged file makes of unpickling
            self.flush()
            return None

    def save_overload(self, signature: Any, data: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(signature, data)


@cache
def _digest_of_sources() -> str:
    folder = Path(__file__).parent
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(folder.glob("*cpu*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
