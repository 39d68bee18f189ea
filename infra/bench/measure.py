"""What a run took besides time: memory of a process and its children, and who else used the machine.

Reads /proc (Linux); elsewhere memory is the process's own peak and the rest is None. The standard library
alone, since it runs in the environments of peers as well. It knows nothing of engines.

Memory is the sum of PSS, in which a page that several processes share counts once; looked at twice a second.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shlex
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PERIOD_S = 0.5
PROC = Path("/proc")
# Instructions that decide what an engine can do on a CPU.
FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimddp",
)


class Watch:
    """Follows this process and its children from `start` to `stop`; use it as a context.

    peak_mb: megabytes (10^6) at the highest. own_cores, other_cores: CPU seconds a second, of ours and of
    everybody else's. A run beside which others took more than a tenth of a core is disturbed.
    """

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self.own_cores: float | None = None
        self.other_cores: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="bench-watch", daemon=True)
        self._started = (0.0, 0.0, 0.0)

    def __enter__(self) -> Watch:
        self._started = (time.monotonic(), own_cpu_seconds(), all_cpu_seconds())
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        began, own, everybody = self._started
        seconds = max(time.monotonic() - began, 1e-9)
        mine = own_cpu_seconds() - own
        if PROC.is_dir():
            self.own_cores = round(mine / seconds, 3)
            self.other_cores = round(max(0.0, all_cpu_seconds() - everybody - mine) / seconds, 3)
        self._over.set()
        self._thread.join()
        self._look()

    def _follow(self) -> None:
        while not self._over.wait(PERIOD_S):
            self._look()

    def _look(self) -> None:
        self.peak_mb = max(self.peak_mb, memory_mb())


def process_age() -> float:
    """Seconds since this process began, the interpreter's own start included."""
    try:
        ticks = int(_stat(os.getpid())[19])
        up = float((PROC / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED
    return up - ticks / os.sysconf("SC_CLK_TCK")


_IMPORTED = time.monotonic()


def memory_mb() -> float:
    """What this process and its children hold now; without /proc, this process's peak."""
    if not PROC.is_dir():
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
    return sum(_pss_kib(pid) for pid in family()) * 1024 / 1e6


def family() -> list[int]:
    """Process ids of this process and everything below it."""
    found = [os.getpid()]
    for pid in found:
        try:
            for task in (PROC / str(pid) / "task").iterdir():
                found.extend(int(child) for child in (task / "children").read_text().split())
        except OSError:
            continue  # it ended meanwhile
    return found


def own_cpu_seconds() -> float:
    """Of this process, its children, and those children that have ended."""
    if not PROC.is_dir():
        return sum(os.times()[:4])
    ticks = 0
    for pid in family():
        try:
            ticks += sum(int(field) for field in _stat(pid)[11:15])
        except (OSError, ValueError, IndexError):
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def all_cpu_seconds() -> float:
    """Of everything on this machine; 0 where that cannot be read."""
    try:
        fields = (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[:3]) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """The processor, and what of its instructions matters here."""
    model, flags = platform.processor() or platform.machine(), set()
    try:
        for line in (PROC / "cpuinfo").read_text().split("\n\n", 1)[0].splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            if name.strip() in ("flags", "Features"):
                flags = set(value.split())
    except OSError:
        pass
    return {
        "cpu": model,
        "cores": cores(),
        "flags": [flag for flag in FLAGS if flag in flags],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def command_line(words: Sequence[str] | None = None) -> str:
    """The command that runs now, without the folders that are nobody else's business."""
    here = Path.cwd()
    shown = []
    for word in words or [Path(sys.executable).name, *sys.argv]:
        name, equals, value = word.rpartition("=")
        path = Path(value)
        if path.is_absolute():
            value = str(path.relative_to(here)) if path.is_relative_to(here) else path.name
        shown.append(name + equals + value)
    return shlex.join(shown)


def save(path: Path, record: Mapping[str, Any] | Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the third on; the second is a name that may hold anything."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _pss_kib(pid: int) -> int:
    try:
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0
