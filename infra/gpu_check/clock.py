"""How long something takes: medians of many runs between events of the device, caches emptied before each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_check.setting import Setting

WARM_UP = 3
LEAST, MOST = 7, 50
SECONDS = 0.25
# More than twice the second cache of any card.
FLUSHED_BYTES = 256 << 20
# Cycles for which the device sleeps before each run, so that all of its launches wait for it and not it for
# them: what is timed is the kernels, not Python.
SLEEP = 4_000_000


@dataclass(frozen=True, slots=True)
class Time:
    """ms: the median. spread: the middle half of the runs, as a share of the median. runs: how many."""

    ms: float
    spread: float
    runs: int

    @property
    def seconds(self) -> float:
        return self.ms / 1e3


def clocked(setting: Setting, work: Callable[[], object]) -> Time:
    """`work` puts kernels on the current stream and waits for nothing."""
    if setting.device.type != "cuda":
        return _on_cpu(work)
    flush = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=setting.device)
    for _ in range(WARM_UP):
        work()
    torch.cuda.synchronize()
    once = _between_events(work, flush, 1)[0]
    runs = int(min(MOST, max(LEAST, SECONDS * 1e3 / max(once, 1e-3))))
    return _summary(_between_events(work, flush, runs))


def _between_events(work: Callable[[], object], flush: torch.Tensor, runs: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for start, end in events:
        flush.zero_()
        torch.cuda._sleep(SLEEP)
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def _on_cpu(work: Callable[[], object]) -> Time:
    started = time.perf_counter()
    work()
    return Time((time.perf_counter() - started) * 1e3, 0.0, 1)


def _summary(times: list[float]) -> Time:
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    return Time(median, (high - low) / median, len(times))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
