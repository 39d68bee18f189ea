"""What this card gives at best, measured now and with random data: every share in the table is of these.

Bandwidth is what a copy moves, reading and writing counted; peaks are the best rate of torch's own products
of square matrices. Data sheets promise more of both, and zeros would be multiplied faster than numbers are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from gpu_check.clock import Time, clocked
from gpu_check.record import Figure, Findings
from gpu_check.setting import Setting

COPY_BYTES = (256 << 20, 2 << 30)
SIZES = (4096, 8192)
FP8 = torch.float8_e4m3fn


def run(setting: Setting, findings: Findings) -> None:
    """facts: bandwidth in bytes/s as `copy` and `read`, peaks in operations/s by the name of a dtype."""
    random = setting.generator("ceilings")
    for name, measure in (("copy", _copy), ("read", _read)):
        rates = [measure(setting, size) for size in ((1 << 16,) if setting.dry else COPY_BYTES)]
        rate, time = max(rates, key=lambda found: found[0])
        findings.facts[name] = rate
        findings.figures.append(_figure(f"memory, {name}", rate / 1e12, "TB/s", time))
    for name, product, size in _products(setting, random):
        try:
            time = clocked(setting, product)
        except (RuntimeError, NotImplementedError) as error:
            line = str(error).splitlines()[0][:90]
            findings.figures.append(Figure(f"peak, {name} {size}", 0.0, "TFLOP/s", detail=f"none: {line}"))
            continue
        rate = 2 * size**3 / time.seconds
        findings.facts[name] = max(rate, findings.facts.get(name, 0.0))
        findings.figures.append(_figure(f"peak, {name} {size}", rate / 1e12, "TFLOP/s", time))


def _figure(name: str, value: float, unit: str, time: Time) -> Figure:
    return Figure(name, value, unit, ms=time.ms, spread=time.spread)


def _copy(setting: Setting, size: int) -> tuple[float, Time]:
    source = torch.rand(size // 4, device=setting.device)
    target = torch.empty_like(source)
    time = clocked(setting, lambda: target.copy_(source))
    if not torch.equal(source, target):
        raise RuntimeError("a copy is not what was copied")
    return 2 * source.nbytes / time.seconds, time


def _read(setting: Setting, size: int) -> tuple[float, Time]:
    source = torch.rand(size // 4, device=setting.device)
    time = clocked(setting, source.sum)
    return source.nbytes / time.seconds, time


def _products(setting: Setting, random: torch.Generator) -> Iterator[tuple[str, Callable[[], Tensor], int]]:
    for size in (32,) if setting.dry else SIZES:
        left, right = (torch.randn(size, size, generator=random, device=random.device) for _ in range(2))
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
            pair = left.to(dtype), right.to(dtype)
            yield name, lambda pair=pair: pair[0] @ pair[1], size
        whole = (left * 40).clamp(-127, 127).to(torch.int8), (right * 40).clamp(-127, 127).to(torch.int8)
        yield "int8", lambda pair=whole: torch._int_mm(pair[0], pair[1].T), size
        small = left.to(FP8), right.to(FP8)
        one = torch.ones((), device=random.device)
        scaled = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        yield "e4m3", partial(scaled, small[0], small[1].T), size
