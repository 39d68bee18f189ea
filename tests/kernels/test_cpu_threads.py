from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable

import pytest

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


def test_without_numba_the_reason_is_that_it_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pagemill.kernels.cpu_vector", None)
    reason = cpu_threads.why_not_compiled.__wrapped__()
    assert reason is not None
    assert "numba does not load" in reason
