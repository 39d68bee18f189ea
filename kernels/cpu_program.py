"""Compiled kernels one after another in a single parallel region: what a step of a model is, on a CPU.

A call of a kernel costs some twenty microseconds before it computes: Python, parameters, waking the threads.
With eight of them a layer and thirty layers that is a fifth of a step of 64 rows. Here the parameters of all
calls are written down once, what depends on the step is changed in place, and the threads go through the
list by themselves, waiting for each other between two calls.

Knows addresses, words and threads; what a kernel computes is none of its business.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from pagemill.kernels import cpu_program_words as words
from pagemill.kernels import cpu_threads

# What a phase's words become for so many rows: {place: value}, its counters set back among them.
Fit = Callable[[int], Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class Phase:
    """One call: machine code void(int64 *words), its words, and which of them depend on the rows.

    fit: equal for phases that it changes alike. words: None for those of the phase before, which this one
    continues. name: by which whoever runs the program finds the phase's words.
    """

    code: int
    words: Sequence[int] | None
    fit: Fit
    name: str = ""


def why_not() -> str | None:
    """Why no program can run here; None if it can."""
    reason = cpu_threads.why_not_compiled()
    if reason is None and _team_size() is None:
        reason = "this OpenMP runtime does not say how many threads have come"
    return reason


class Program:
    """Phases, ready to run. `words` [calls, STRIDE] int64 are their parameters, to be changed between runs.

    Whoever makes it keeps alive what the words point to. One run at a time.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        calls = [phase for phase in phases if phase.words is not None]
        self.words = cpu_threads.aligned_words(len(calls) * words.STRIDE).reshape(len(calls), words.STRIDE)
        self._list = np.zeros((len(phases), 2), np.int64)
        self._head = cpu_threads.aligned_words(words.WORDS)
        fits: dict[Fit, list[int]] = {}
        names: dict[str, list[int]] = {}
        call = -1
        for phase, entry in zip(phases, self._list, strict=True):
            if phase.words is not None:
                call += 1
                self.words[call, : len(phase.words)] = phase.words
                fits.setdefault(phase.fit, []).append(call)
                names.setdefault(phase.name, []).append(call)
            entry[:] = phase.code, self.words[call].ctypes.data
        self._fits = {fit: np.array(of) for fit, of in fits.items()}
        self._names = {name: np.array(of) for name, of in names.items()}
        self._head[words.COUNT], self._head[words.LIST] = len(phases), self._list.ctypes.data
        self._head[words.TEAM_SIZE], self._head[words.YIELD] = _team_size() or 0, _yield()

    def calls(self, name: str) -> npt.NDArray[np.int64]:
        """Which rows of `words` belong to phases of that name, in their order."""
        return self._names[name]

    def run(self, rows: int, threads: int) -> None:
        for fit, calls in self._fits.items():
            for place, value in fit(rows).items():
                self.words[calls, place] = value
        self._head[words.ARRIVED] = 0
        cpu_threads.run(_code(), self._head.ctypes.data, threads)


@cache
def _team_size() -> int | None:
    """The address of omp_get_num_threads; None where there is no OpenMP that we know."""
    if cpu_threads.openmp() is None:
        return None
    try:
        function = ctypes.CDLL(torch._C.__file__).omp_get_num_threads
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


@cache
def _yield() -> int:
    """The address of sched_yield."""
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


@cache
def _code() -> int:
    from pagemill.kernels.cpu_program_kernel import compile_program

    return compile_program()
