from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagemill.kernels import cpu_threads


def visitors(run: Callable[[int, int, int], None], threads: int) -> tuple[set[int], list[int]]:
    """Which threads called, and with which argument."""
    seen: set[int] = set()
    arguments: list[int] = []
    all_here = threading.Barrier(threads, timeout=30)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def visit(words: int) -> None:
        seen.add(threading.get_ident())
        arguments.append(words)
        all_here.wait()  # a thread that waits cannot come twice

    address = ctypes.cast(visit, ctypes.c_void_p).value
    assert address is not None
    run(address, 4711, threads)
    return seen, arguments


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_thread_calls_once_with_the_words(threads: int) -> None:
    seen, arguments = visitors(cpu_threads.run, threads)
    assert len(seen) == threads
    assert arguments == [4711] * threads


def test_python_threads_do_where_openmp_is_unknown() -> None:
    seen, arguments = visitors(cpu_threads.run_on_python_threads, 2)
    assert len(seen) == 2
    assert arguments == [4711] * 2


def test_the_pool_of_torch_is_found() -> None:
    assert cpu_threads.openmp() is not None


def team_sizes() -> list[int]:
    """Threads of the process: before one has computed, after, and after its team was dismissed."""
    found: list[int] = []

    def count() -> None:
        found.append(len(list(Path("/proc/self/task").iterdir())))

    def compute() -> None:
        torch.set_num_threads(3)
        count()
        assert len(visitors(cpu_threads.run, 3)[0]) == 3
        count()
        cpu_threads.dismiss()
        for _ in range(100):  # a thread that was told to end takes a moment
            if len(list(Path("/proc/self/task").iterdir())) == found[0]:
                break
            time.sleep(0.05)
        count()
        # And they come again when they are needed.
        assert len(visitors(cpu_threads.run, 3)[0]) == 3

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    return found


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_a_thread_that_has_computed_can_let_its_team_go() -> None:
    before, computing, after = team_sizes()
    assert computing == before + 2
    assert after == before


def test_without_numba_the_reason_is_that_it_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pagemill.kernels.cpu_vector", None)
    reason = cpu_threads.why_not_compiled.__wrapped__()
    assert reason is not None
    assert "numba does not load" in reason
