"""Whether kernels can be compiled for this CPU, and how they run: on the threads of torch's own OpenMP pool.

Two OpenMP runtimes in one process each keep a pool that spins while it waits for work, and on few cores
each ruins the other: numba brings its own, torch's wheel another. So kernels here are compiled for one
thread and share out their work by counting, and this calls them through the runtime that torch loaded.
The threads that have just finished a matrix product are then the ones that begin the kernel.

Knows addresses and numbers of threads only.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
import sys
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def why_not_compiled() -> str | None:
    """Why nothing can be compiled here; None if it can. The first call imports numba: half a second."""
    if sys.byteorder != "little" or sys.maxsize < 1 << 32:
        return "they are written for 64-bit little-endian CPUs"
    try:
        importlib.import_module("pagemill.kernels.cpu_vector")
    except ImportError as error:
        return f"numba does not load ({error})"
    return None


# The parameter block of a kernel: int64, or whatever else lies at its address.
Words: TypeAlias = "int | array[int]"


def words_of(*values: int) -> array[int]:
    """A few hundred times a step: an array of ctypes takes 4 microseconds, and its type 25 if made anew."""
    return array("q", values)


def aligned_words(count: int) -> npt.NDArray[np.int64]:
    """Zeroed words that begin at a cache line."""
    memory = np.zeros(count + 8, np.int64)
    start = -memory.ctypes.data % 64 // 8
    return memory[start : start + count]


@cache
def float_word(value: float) -> int:
    """A word that holds a float32 in its low half."""
    return int.from_bytes(struct.pack("<f", value), "little")


def run(function: int, words: Words, threads: int) -> None:
    """Calls the C function void(int64 *words) once on each thread and returns when all have.

    The function divides the work itself, and must be right whatever the number of threads that come.
    """
    address = words if isinstance(words, int) else words.buffer_info()[0]
    if threads == 1:
        _FUNCTION(function)(address)
        return
    (openmp() or run_on_python_threads)(function, address, threads)


@cache
def openmp() -> Callable[[int, int, int], None] | None:
    """A parallel region of the OpenMP runtime that torch is linked with; None where it has no such entry.

    GOMP_parallel is libgomp's entry, and LLVM's and Intel's runtimes answer to it as well.
    """
    try:
        # Looking in torch's own module finds the runtime among its dependencies, and no other.
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None

    def region(function: int, address: int, threads: int) -> None:
        parallel(function, address, threads, 0)

    return region


def dismiss() -> None:
    """Ends the threads that wait for this one's next parallel region; it gets others when it needs them.

    libgomp keeps a team for every thread that ever computed, and as soon as all of them are more than the
    cores, those that wait go to sleep at once instead of watching for work. Waking them costs each region
    tens of microseconds (a norm of 30 rows: 45 instead of 8), so a thread that has loaded a model, and may
    leave the computing to another, lets its own go.
    """
    try:
        runtime = ctypes.CDLL(torch._C.__file__)
        pause = runtime.omp_pause_resource_all
    except (OSError, AttributeError):
        return
    # LLVM's and Intel's have one team for all, and would have to be started again as a whole.
    if not hasattr(runtime, "__kmpc_fork_call"):
        pause.restype = ctypes.c_int
        pause(_HARD)


# omp_pause_hard of OpenMP 5.0: nothing needs to stay but results.
_HARD = 2


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="kernel")


def run_on_python_threads(function: int, address: int, threads: int) -> None:
    """Slower to start (tens of microseconds), and all there is without a known OpenMP."""
    call = _FUNCTION(function)
    others = [_pool(threads - 1).submit(call, address) for _ in range(threads - 1)]
    call(address)
    for other in others:
        other.result()
