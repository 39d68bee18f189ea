"""One thing to check: random inputs, the kernel over them, the reference over them, and how near is right."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_check.compare import EXACT, Tolerance, compare
from gpu_check.fault import broken, poisoned
from gpu_check.record import Check, Findings
from gpu_check.setting import Setting

Results = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """run: the kernel, anew at each call, and on inputs of its own where it changes them. expected: the same
    by other means. how: a tolerance for each result."""

    run: Callable[[], Results]
    expected: Callable[[], Results]
    how: Sequence[Tolerance]


@dataclass(frozen=True, slots=True)
class Case:
    """name: kernel, shape and dtype. make: inputs, from a generator that hangs on the seed and the name."""

    name: str
    make: Callable[[torch.Generator], Trial]


def check(case: Case, setting: Setting) -> Check:
    """Compares, and runs once more: a kernel that gives other bits for the same inputs has a race."""
    try:
        trial = case.make(setting.generator(case.name))
        with broken(setting.fault, case.name) as spoilt, poisoned():
            found = spoilt(trial.run())
        first = compare(case.name, found, trial.expected(), trial.how)
        if not first.ok or setting.dry:
            return first
        with poisoned():
            again = trial.run()
        second = compare(case.name, again, found, [EXACT] * len(found))
        return first if second.ok else Check(case.name, False, None, f"run again, {second.detail}")
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename.rsplit('/', 1)[-1]}:{place.lineno}"
        lines = str(error).strip().splitlines() or [""]
        return Check(case.name, False, None, f"{type(error).__name__}: {lines[0]} ({where})")


def check_all(cases: Iterable[Case], setting: Setting, findings: Findings) -> None:
    """Those of this process's share; what the time does not reach is an error and not a success."""
    index, of = setting.share
    wanted = [case for case in cases if setting.wants(case.name)]
    mine = wanted[index::of]
    for number, case in enumerate(mine):
        if setting.left < 0:
            raise TimeoutError(f"the time was up before {len(mine) - number} checks, first {case.name}")
        findings.checks.append(check(case, setting))
