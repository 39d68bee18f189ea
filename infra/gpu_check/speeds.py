"""How much of the card's bandwidth, or of its peak, each kernel reaches, at the sizes of Llama 3.1 8B.

What is timed is checked right before on the same tensors, and its result is compared once more after the last
timed run. Bytes are those that must be moved at least: every input once, every result once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_check.check_sample import SCORE, filters_of, random_logits, shortfall
from gpu_check.check_small import random_shaping
from gpu_check.clock import Time, clocked
from gpu_check.compare import EXACT, ROUNDED, Tolerance, compare
from gpu_check.fault import broken, poisoned
from gpu_check.paged import BLOCK, EIGHT_BITS
from gpu_check.record import Figure, Findings
from gpu_check.setting import Setting
from pagemill.kernels import (
    activation_triton,
    linear_triton,
    norm_triton,
    rope_write_triton,
    sample_triton,
    shape_logits_triton,
)
from pagemill.kernels.linear_fp8 import FP8
from pagemill.kernels.linear_int8 import rotate
from pagemill.kernels.shape_logits import shape_logits_torch

SMALL_MARK = 0.8


@dataclass(frozen=True, slots=True)
class Speed:
    """timed: the kernel alone; may run any number of times. seen: what of that is compared with `expected`,
    not timed. work: bytes, or operations, of one run. of: the fact that has the ceiling."""

    name: str
    timed: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    how: Tolerance
    work: float
    of: str = "copy"
    mark: float | None = None
    seen: Callable[[Tensor], Tensor] = lambda found: found


def measure(speeds: Iterator[Speed], setting: Setting, findings: Findings) -> None:
    for speed in speeds:
        if not setting.wants(speed.name):
            continue
        if setting.left < 0:
            raise TimeoutError(f"the time was up before {speed.name}")
        _measure(speed, setting, findings)


def _measure(speed: Speed, setting: Setting, findings: Findings) -> None:
    started = time.perf_counter()
    with broken(setting.fault, speed.name) as spoilt, poisoned():
        (first,) = spoilt((speed.seen(speed.timed()),))
    once = Time((time.perf_counter() - started) * 1e3, 0.0, 1)
    check = compare(speed.name, [first], [speed.expected()], [speed.how])
    findings.checks.append(check)
    if not check.ok:
        return
    last: list[Tensor] = []

    def work() -> None:
        last[:] = [speed.timed()]

    # Interpreted once is long enough.
    took = once if setting.dry else clocked(setting, work)
    if last:
        again = compare(f"{speed.name}, as timed", [speed.seen(last[0])], [first], [EXACT])
        if not again.ok:
            findings.checks.append(again)
            return
    ceiling = setting.facts.get(speed.of)
    rate = speed.work / took.seconds
    findings.figures.append(
        Figure(
            speed.name,
            rate / 1e12,
            "TB/s" if speed.of == "copy" else "TFLOP/s",
            of=speed.of,
            share=rate / ceiling if ceiling else None,
            mark=speed.mark,
            ms=took.ms,
            spread=took.spread,
        )
    )


def run(setting: Setting, findings: Findings) -> None:
    measure(_speeds(setting), setting, findings)


def _speeds(setting: Setting) -> Iterator[Speed]:
    random = setting.generator("speeds")
    tokens, hidden, inner = (4, 64, 96) if setting.dry else (8192, 4096, 14336)
    yield from _norms(setting, random, tokens, hidden)
    yield _gate(setting, random, tokens, inner)
    for count in (tokens,) if setting.dry else (8192, 256):
        yield _rope(setting, random, count)
    yield from _layers(setting, random, hidden, inner)
    yield from _choosing(setting, random)


def _numbers(setting: Setting, random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random, device=random.device, dtype=setting.sixteen)


def _norms(setting: Setting, random: torch.Generator, tokens: int, width: int) -> Iterator[Speed]:
    x, weight = _numbers(setting, random, tokens, width), _numbers(setting, random, width)
    residual = _numbers(setting, random, tokens, width)
    near = ROUNDED[setting.sixteen]

    def normed(x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()

    yield Speed(
        f"rms_norm: {tokens} x {width}",
        lambda: norm_triton.rms_norm(x, weight, 1e-5),
        lambda: normed(x),
        near,
        2 * x.nbytes,
        mark=SMALL_MARK,
    )
    # Added to again in every run, it would grow: what is added is nothing, and as large.
    nothing = torch.zeros_like(x)
    yield Speed(
        f"add_rms_norm: {tokens} x {width}",
        lambda: norm_triton.add_rms_norm(residual, nothing, weight, 1e-5),
        lambda: normed(residual),
        near,
        4 * x.nbytes,
        mark=SMALL_MARK,
    )


def _gate(setting: Setting, random: torch.Generator, tokens: int, width: int) -> Speed:
    x = _numbers(setting, random, tokens, 2 * width)

    def expected() -> Tensor:
        gate, up = x.float().chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    return Speed(
        f"silu_mul: {tokens} x {width}",
        lambda: activation_triton.gate(x, gelu=False),
        expected,
        ROUNDED[setting.sixteen],
        x.nbytes * 1.5,
        mark=SMALL_MARK,
    )


def _rope(setting: Setting, random: torch.Generator, tokens: int) -> Speed:
    """Turned again and again a head would not stay what it was: by an angle of 0 it does."""
    heads, kv_heads, head_dim = (2, 1, 16) if setting.dry else (32, 8, 128)
    whole = _numbers(setting, random, tokens, heads + 2 * kv_heads, head_dim)
    before = whole.clone()
    cos = torch.ones(tokens, head_dim // 2, device=random.device, dtype=whole.dtype)
    sin = torch.zeros_like(cos)
    order = torch.randperm(-(-tokens // BLOCK) + 3, generator=random, device=random.device)
    place = torch.arange(tokens, device=random.device)
    blocks, offsets = order[place // BLOCK], place % BLOCK
    shape = (len(order), 2, 2, kv_heads, head_dim * BLOCK)
    memory = torch.full(shape, torch.nan, dtype=whole.dtype, device=random.device)

    def timed() -> Tensor:
        rope_write_triton.rope_write(whole, heads, cos, sin, memory[:, 1], blocks, offsets)
        return whole

    def seen(whole: Tensor) -> Tensor:
        keys = memory[:, 1, 0].unflatten(2, (head_dim, BLOCK))[blocks, :, :, offsets]
        values = memory[:, 1, 1].unflatten(2, (BLOCK, head_dim))[blocks, :, offsets]
        return torch.cat([whole[:, :heads], keys, values], 1)

    # Queries are read and written where they lie; keys and values are read there and written to memory.
    return Speed(
        f"rope_write: {tokens} tokens",
        timed,
        lambda: before,
        ROUNDED[whole.dtype],
        2 * whole.nbytes,
        mark=SMALL_MARK if tokens >= 1024 else None,
        seen=seen,
    )


def _layers(setting: Setting, random: torch.Generator, hidden: int, inner: int) -> Iterator[Speed]:
    for dtype, peak in ((torch.int8, "int8"), (FP8, "e4m3")):
        block = 128 if dtype == torch.int8 and not setting.dry else 1
        weight = _numbers(setting, random, inner, hidden)
        values, scales = linear_triton.round_rows(weight, dtype, block)
        # Rotated twice a number is `block` times as large.
        scales = scales / block
        layer = linear_triton.Layer(values, scales, torch.zeros_like(scales), block)
        near = Tolerance(0.0, 8 * hidden**0.5, 0.06)
        for rows in (3,) if setting.dry else (64, 8192):
            x = _numbers(setting, random, rows, hidden)
            expected = lambda x=x, weight=weight: x.float() @ weight.float().T  # noqa: E731
            if rows < 100 and not setting.dry:
                name, work, of = "bandwidth", values.nbytes + x.nbytes + rows * inner * 2, "copy"
            else:
                name, work, of = "peak", 2 * rows * hidden * inner, peak
            yield Speed(
                f"{peak} layer, {name}: {rows} x {hidden} to {inner}",
                lambda x=x, layer=layer: layer(x),
                expected,
                near,
                work,
                of,
            )
        if not setting.dry:
            yield _rounding(setting, random, dtype, block, hidden, peak)


def _rounding(
    setting: Setting, random: torch.Generator, dtype: torch.dtype, block: int, width: int, name: str
) -> Speed:
    x = _numbers(setting, random, 8192, width)
    return Speed(
        f"rows rounded to {name}: 8192 x {width}",
        lambda: linear_triton.round_rows(x, dtype, block)[1],
        lambda: rotate(x, block).abs().amax(-1) / EIGHT_BITS[dtype],
        Tolerance(1e-5, 0.0, 1e-5),
        x.nbytes * 1.5,
    )


def _choosing(setting: Setting, random: torch.Generator) -> Iterator[Speed]:
    rows, vocabulary = (1, 40) if setting.dry else (512, 128_256)
    logits = random_logits(random, rows, vocabulary, 3.0)
    nothing = torch.zeros(rows, dtype=torch.float64, device=random.device)
    for name, options in (
        ("any token", {}),
        ("top-p 0.95", {"top_p": 0.95, "temperature": 0.7}),
        ("top-k 50", {"top_k": 50}),
    ):
        filters = filters_of([options] * rows, 7, random.device)
        yield Speed(
            f"sample, {name}: {rows} x {vocabulary}",
            lambda filters=filters: sample_triton.sample_tokens(logits, *filters),
            lambda: nothing,
            Tolerance(0.0, SCORE, 0.0),
            rows * vocabulary * 4,
            seen=lambda tokens, filters=filters: shortfall(logits, filters, tokens),
        )
    yield _shaping(random, rows, vocabulary)


def _shaping(random: torch.Generator, rows: int, vocabulary: int) -> Speed:
    """With a penalty too small to change a number, so that twice is the same as once and yet all is read."""
    shaping = random_shaping(random, rows, vocabulary, 8, 4)
    shaping = replace(
        shaping,
        presence=torch.full_like(shaping.presence, 1e-30),
        frequency=torch.zeros_like(shaping.frequency),
        repetition=torch.ones_like(shaping.repetition),
        bias=torch.zeros_like(shaping.bias),
    )
    slots = torch.arange(rows, device=random.device)
    before = torch.randn(rows, vocabulary, generator=random, device=random.device)
    logits = before.clone()

    def timed() -> Tensor:
        shape_logits_triton.shape_logits(logits, slots, shaping)
        return logits

    def expected() -> Tensor:
        banned = before.clone()
        shape_logits_torch(banned, slots, shaping)
        return banned

    # Logits are read and written, counts read.
    return Speed(
        f"shape_logits: {rows} x {vocabulary}",
        timed,
        expected,
        EXACT,
        rows * vocabulary * 12,
        seen=torch.clone,
    )
