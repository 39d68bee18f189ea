"""Programs of kernels: the same numbers as the kernels one by one, on any number of threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from pagemill.kernels import cpu_program, linear_cpu, small_cpu
from pagemill.kernels.cpu_program import Phase, Program
from pagemill.kernels.linear_cpu_words import ADD, STORE


@pytest.fixture(autouse=True, params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


Callback = Callable[[int], None]


def no_rows(rows: int) -> dict[int, int]:
    return {}


def phase_of(callback: ctypes._FuncPointer, *words: int) -> Phase:
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    return Phase(address, words, no_rows)


def test_a_program_can_run_here() -> None:
    assert cpu_program.why_not() is None


def test_every_thread_ends_a_phase_before_any_begins_the_next(threads: int) -> None:
    """Each phase says that it was entered, and looks whether all threads have left the one before."""
    lock, left, early = threading.Lock(), [0] * 40, []

    def visit(number: int) -> ctypes._FuncPointer:
        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def call(words: int) -> None:
            with lock:
                if number and left[number - 1] != threads:
                    early.append(number)
                left[number] += 1

        return call

    callbacks = [visit(number) for number in range(40)]
    program = Program([phase_of(callback) for callback in callbacks])
    for _ in range(5):
        left[:] = [0] * 40
        program.run(1, threads)
        assert left == [threads] * 40
    assert early == []


def test_a_phase_gets_its_own_words_or_those_of_the_one_before() -> None:
    seen: list[tuple[int, int]] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def call(words: int) -> None:
        block = ctypes.cast(words, ctypes.POINTER(ctypes.c_int64))
        seen.append((block[0], block[1]))

    address = ctypes.cast(call, ctypes.c_void_p).value or 0

    def rows_at_one(rows: int) -> dict[int, int]:
        return {1: rows}

    program = Program(
        [
            Phase(address, [7, 0], rows_at_one),
            Phase(address, None, rows_at_one),
            Phase(address, [8, 0], no_rows, "named"),
        ]
    )
    program.run(5, 1)
    program.words[program.calls("named"), 1] = 99
    program.run(6, 1)
    assert seen == [(7, 5), (7, 5), (8, 0), (7, 6), (7, 6), (8, 99)]


@pytest.mark.parametrize("rows", [1, 5, 64, 100, 3])
def test_kernels_in_a_program_give_what_they_give_one_by_one(rows: int, threads: int) -> None:
    room = 128
    x, residual, between = (torch.empty(room, size) for size in (64, 64, 96))
    first, second = linear_cpu.pack(torch.randn(96, 64)), linear_cpu.pack(torch.randn(64, 96))
    weight = torch.randn(64)
    program = Program(
        [
            small_cpu.norm_phase(residual, weight, 1e-5, x),
            linear_cpu.phase(x, first, None, between, STORE, threads),
            linear_cpu.phase(between, second, None, residual, ADD, threads),
        ]
        * 3
    )
    for _ in range(3):
        expected = torch.randn(rows, 64)
        residual[:rows] = expected
        residual[rows:] = 7.0
        for _ in range(3):
            inner = linear_cpu.linear(small_cpu.rms_norm(expected, weight, 1e-5), first, None)
            linear_cpu.linear_add(inner, second, None, expected)
        program.run(rows, threads)
        assert torch.equal(residual[:rows], expected)
        assert (residual[rows:] == 7.0).all(), "rows that are not there were touched"
