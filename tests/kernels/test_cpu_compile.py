from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from pagemill.kernels import cpu_compile  # noqa: E402
from pagemill.kernels.cpu_vector import get, put  # noqa: E402


def adder(number: float) -> Callable[[int], None]:
    def add(params: int) -> None:
        put(params, get(params) + np.float32(number))

    return add


def result(address: int) -> float:
    memory = np.zeros(2, np.float32)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(memory.ctypes.data)
    return float(memory[0])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def compiled_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.nbc"))


def test_machine_code_is_kept_by_variant(folder: Path) -> None:
    assert result(cpu_compile.c_function(adder(2), 2)) == 2
    assert result(cpu_compile.c_function(adder(3), 3)) == 3
    kept = compiled_files(folder)
    assert len(kept) == 2
    before = [path.stat().st_mtime_ns for path in kept]
    assert result(cpu_compile.c_function(adder(2), 2)) == 2
    assert [path.stat().st_mtime_ns for path in compiled_files(folder)] == before


OUTER = """
import ctypes, sys
import numpy as np
from pagemill.kernels.cpu_compile import c_function, inner
from pagemill.kernels.cpu_vector import get, put

def make(number):
    def step(params):
LONG
        put(params, get(params) + np.float32(number))
    compiled = inner(step, number)
    def call(params):
        compiled(params)
    return c_function(call, number)

for number in map(int, sys.argv[1:]):
    memory = np.zeros(2, np.float32)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(make(number))(memory.ctypes.data)
    print(int(memory[0]))
"""


def test_code_from_disk_and_code_compiled_now_do_not_mix(folder: Path, tmp_path: Path) -> None:
    """Both hold an inner function of one name, which each process counts from one."""
    script = tmp_path / "outer.py"
    # Too long a function to be inlined, which would hide what is linked with what.
    line = "        put(params + 4, get(params + 4) * get(params) + np.float32(number))"
    script.write_text(OUTER.replace("LONG", "\n".join([line] * 200)))

    def run(*numbers: str) -> list[str]:
        env = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "kept"), "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, str(script), *numbers]
        return subprocess.run(command, env=env, capture_output=True, check=True, text=True).stdout.split()

    assert run("2") == ["2"]
    assert run("3", "2") == ["3", "2"]


def test_a_damaged_file_is_compiled_again(folder: Path) -> None:
    cpu_compile.c_function(adder(2), 2)
    for path in folder.rglob("*.nb*"):
        path.write_bytes(b"no machine code")
    assert result(cpu_compile.c_function(adder(2), 2)) == 2


def test_without_a_folder_to_write_it_compiles_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no locator available")

    monkeypatch.setattr(cpu_compile, "_KernelCache", fail)
    assert result(cpu_compile.c_function(adder(2), 2)) == 2
