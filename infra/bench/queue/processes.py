"""What processes took: CPU seconds, by process and by thread, and the most memory each has held.

Reads /proc, so it needs Linux. It may not know what the processes do.
"""

from __future__ import annotations

import os
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its ended threads included; 0.0 once it is gone."""
    try:
        return _times(Path(f"/proc/{pid}/stat"))
    except OSError:
        return 0.0


def main_thread_seconds(pid: int) -> float:
    """The same of the thread that the process began with."""
    try:
        return _times(Path(f"/proc/{pid}/task/{pid}/stat"))
    except OSError:
        return 0.0


def _times(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def children(pid: int) -> list[int]:
    """Processes that it started and that still run."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def peak_mb(pid: int) -> float:
    """Most resident memory since the start or the last `reset_peak`, in 10^6 bytes."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    except OSError:
        pass
    return 0.0


def reset_peak(pid: int) -> None:
    """From now on `peak_mb` tells the most since now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
