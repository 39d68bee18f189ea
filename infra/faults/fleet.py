"""Worker processes of a chaos run: kept running, with their logs in files, and struck on demand.

A worker that ends is started again, as an orchestrator would. This room knows processes, and may not know
what the workers work on.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ENDS = frozenset({0, 5, 6, 7, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM})
"""Exit codes that need no explanation: asked to (before it was up, too), storage or Redis away at the start,
a sick engine, killed."""
WATCH_S = 0.1
FULL_AT = 256
"""Bytes a file may have on a disk that is full."""


@dataclass(eq=False)
class Life:
    """One process, from its start to its end."""

    slot: int
    process: subprocess.Popen[bytes]
    log: Path
    frozen: list[int] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def engine_pids(self) -> list[int]:
        found: list[int] = []
        with suppress(OSError):
            for task in Path(f"/proc/{self.process.pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return found

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def freeze(self, *, engine: bool) -> None:
        self.frozen = [self.process.pid, *(self.engine_pids() if engine else [])]
        for pid in self.frozen:
            _signal(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self.frozen:
            _signal(pid, signal.SIGCONT)
        self.frozen = []

    def kill_engine(self) -> None:
        for pid in self.engine_pids():
            _signal(pid, signal.SIGKILL)

    def fill_disk(self, full: bool) -> None:
        """No file of it grows past a few bytes: what an exhausted quota looks like, and needs no root."""
        most = FULL_AT if full else resource.RLIM_INFINITY
        with suppress(OSError):
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class Fleet:
    """`count` workers. said: told in one line what happened."""

    def __init__(
        self, folder: Path, count: int, variables: dict[str, str], said: Callable[[str], None]
    ) -> None:
        self.folder, self.scratch = folder, folder / "scratch"
        self.scratch.mkdir()
        self._env = {**os.environ, **variables, "TMPDIR": str(self.scratch)}
        self._said = said
        self._lock = threading.Lock()
        self._leaving = False
        self._numbers = Counter[int]()
        self.ends = Counter[int]()
        self.lives = [self._start(slot) for slot in range(count)]
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="fleet")
        self._watcher.start()

    def alive(self) -> list[Life]:
        """Those that run and are not frozen."""
        with self._lock:
            return [life for life in self.lives if life.alive and not life.frozen]

    def thaw_all(self) -> None:
        for life in self.lives:
            life.thaw()
            life.fill_disk(False)

    def leave(self, seconds: float) -> list[str]:
        """SIGTERM to all; what is wrong with how they ended."""
        with self._lock:
            self._leaving = True
        self._watcher.join()
        for life in self.lives:
            life.send(signal.SIGTERM)
        deadline, wrong = time.monotonic() + seconds, []
        for life in self.lives:
            try:
                code = life.process.wait(max(0.1, deadline - time.monotonic()))
                if code != 0:
                    wrong.append(f"worker {life.slot} ended with {code} when it was asked to")
            except subprocess.TimeoutExpired:
                wrong.append(f"worker {life.slot} did not end within {seconds:g} s")
                life.process.kill()
                life.process.wait()
        return wrong

    def kill(self) -> None:
        """Whatever is left, at once."""
        with self._lock:
            self._leaving = True
        for life in self.lives:
            life.thaw()
            if life.alive:
                life.process.kill()
            life.process.wait()

    def unforeseen(self) -> list[str]:
        """Exit codes and tracebacks that nothing explains."""
        found = [
            f"{count} workers ended with {code}" for code, count in self.ends.items() if code not in ENDS
        ]
        for log in sorted(self.folder.glob("worker-*.log")):
            count = log.read_text(errors="replace").count("Traceback (most recent call last)")
            if count:
                found.append(f"{count} tracebacks in {log.name}")
        return found

    def _start(self, slot: int) -> Life:
        log = self.folder / f"worker-{slot}-{self._numbers[slot]:03d}.log"
        self._numbers[slot] += 1
        # Its log comes through a pipe: a worker without disk could not write it itself.
        process = subprocess.Popen(
            [sys.executable, "-m", "pagemill.worker.main"],
            env={**self._env, "PAGEMILL_WORKER_ID": log.stem},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        threading.Thread(target=_copy, args=(process, log), daemon=True, name=log.stem).start()
        return Life(slot, process, log)

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._leaving:
                    return
                for slot, life in enumerate(self.lives):
                    code = life.process.poll()
                    if code is not None:
                        self.ends[code] += 1
                        self._said(f"{life.log.stem} ended with {code}, another starts")
                        self.lives[slot] = self._start(slot)
            time.sleep(WATCH_S)


def _copy(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.stdout is not None
    with process.stdout, log.open("wb", buffering=0) as out:
        while piece := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
            out.write(piece)
