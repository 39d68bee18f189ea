"""Runs the parts, each in processes of its own: what one breaks on the device is not the next one's trouble.

Checks run beside one another, as they wait for the compiler more than for the device; what is timed runs
alone. A part that takes too long is ended, and says so in the table. How processes are started is start.py's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpu_check.record import Findings
from gpu_check.setting import Setting

Work = Callable[[Setting, Findings], None]
# How long after its time a part has to come to an end by itself.
GRACE = 10
# All of it, the start of Python left out: 8 minutes were promised.
WHOLE = 465
# A share that ends long after the others is not worth more of them.
MOST_SHARES = 8


@dataclass(frozen=True, slots=True)
class Part:
    """seconds: what it may take on a card. timed: whether it has to have the device to itself. cut: whether
    it can be shared out."""

    name: str
    title: str
    work: Work
    seconds: float
    timed: bool = True
    cut: bool = False


def run_parts(parts: Iterable[Part], setting: Setting, say: Callable[[str], None]) -> dict[str, Findings]:
    """All that is not timed first, together, and then one after another what is. facts of a part are given to
    those after it."""
    parts = list(parts)
    until = time.monotonic() + (float("inf") if setting.dry else WHOLE)
    together = [part for part in parts if not part.timed]
    found = _together(together, setting, until, say) if together else {}
    facts = dict(setting.facts)
    for part in parts:
        if part.timed:
            found |= _together([part], replace(setting, facts=facts), until, say)
            facts |= found[part.name].facts
    return {part.name: found[part.name] for part in parts}


def _together(
    parts: list[Part], setting: Setting, until: float, say: Callable[[str], None]
) -> dict[str, Findings]:
    """until: when all has to be over, on the monotonic clock."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = 1 if setting.dry else max(1, min(MOST_SHARES, cores - 1))
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        started = [
            _Process(part, replace(setting, share=(index, count), deadline=until), Path(folder))
            for part in parts
            for count in [shares if part.cut else 1]
            for index in range(count)
        ]
        found: dict[str, Findings] = {}
        for process in started:
            findings = process.findings()
            if process.part.name in found:
                found[process.part.name].add(findings)
            else:
                found[process.part.name] = findings
    for name, findings in found.items():
        wrong = sum(not check.ok for check in findings.checks)
        state = findings.error or (f"{wrong} wrong" if wrong else "done")
        counts = f"{len(findings.checks)} checks, {len(findings.figures)} figures"
        say(f"{name}: {counts}, {findings.seconds:.0f} s, {state}")
    return found


class _Process:
    """One share of one part, from its start to what it found."""

    def __init__(self, part: Part, setting: Setting, folder: Path) -> None:
        self.part, self.started = part, time.monotonic()
        self.limit = part.seconds * (10 if setting.dry else 1)
        self.limit = max(1.0, min(self.limit, setting.deadline - GRACE - self.started))
        self._path = folder / f"{part.name}-{setting.share[0]}.json"
        setting = replace(setting, deadline=self.started + self.limit)
        context = multiprocessing.get_context(setting.start)
        self._process = context.Process(target=_work, args=(part, setting, self._path), name=part.name)
        self._process.start()

    def findings(self) -> Findings:
        process = self._process
        process.join(max(0.0, self.started + self.limit + GRACE - time.monotonic()))
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        if self._path.exists():
            return Findings.read(json.loads(self._path.read_text()))
        seconds = time.monotonic() - self.started
        if late:
            return Findings(seconds=seconds, error=f"it was ended after {seconds:.0f} s")
        code = process.exitcode or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"
        return Findings(seconds=seconds, error=f"its process ended {how} and left nothing")


def _work(part: Part, setting: Setting, path: Path) -> None:
    started = time.monotonic()
    torch.manual_seed(setting.seed)
    # What has been found by then is kept; where this cannot reach (a kernel that never ends) the process is
    # killed a little later.
    signal.signal(signal.SIGALRM, _time_is_up)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, setting.left))
    findings = Findings()
    try:
        part.work(setting, findings)
    except Exception as error:
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        first = (str(error).strip().splitlines() or [""])[0][:300]
        findings.error = f"{type(error).__name__}: {first} ({Path(place.filename).name}:{place.lineno})"
    signal.setitimer(signal.ITIMER_REAL, 0)
    findings.seconds = time.monotonic() - started
    # In one piece, or not at all.
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(findings.record()))
    partial.rename(path)


def _time_is_up(number: int, frame: object) -> None:
    raise TimeoutError("its time was up")
