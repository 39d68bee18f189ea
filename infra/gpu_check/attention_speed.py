"""Attention against the card's bandwidth and against torch's own over the same keys and values, laid densely.

Decode reads keys and values: its ceiling is the copy's bandwidth. Prefill multiplies: it is held to the flash
backend of `scaled_dot_product_attention`, which has no block tables to follow. The fastest backend of torch
stands beside each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_check.clock import Time, clocked
from gpu_check.compare import ROUNDED, compare
from gpu_check.fault import broken, poisoned
from gpu_check.paged import Paged, Row, attention, paged, wide_query
from gpu_check.record import Check, Figure, Findings
from gpu_check.setting import Setting
from pagemill.kernels import attention_triton as kernel

DECODE_MARK, PREFILL_MARK = 0.85, 0.6
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# Rows of a step that are compared with float64, and layers between which reads are spread, as in an engine.
COMPARED, LAYERS = 6, 4


@dataclass(frozen=True, slots=True)
class Step:
    """stored: the memory's dtype, None for the queries'. beside: whether torch's own is timed over it too."""

    name: str
    rows: tuple[Row, ...]
    heads: int
    kv_heads: int
    head_dim: int
    mark: float | None = None
    stored: torch.dtype | None = None
    beside: bool = False

    @property
    def decoding(self) -> bool:
        return self.rows[0].new == 1


def run(setting: Setting, findings: Findings) -> None:
    for step in steps(setting):
        if not setting.wants(step.name):
            continue
        if setting.left < 0:
            raise TimeoutError(f"the time was up before {step.name}")
        _measure(step, setting, findings)
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()


def steps(setting: Setting) -> Iterator[Step]:
    if setting.dry:
        yield Step("decode, tiny", (Row(17),) * 2, 2, 1, 16, DECODE_MARK, beside=True)
        yield Step("prefill, tiny", (Row(16, new=16),), 2, 1, 16, PREFILL_MARK, beside=True)
        return
    llama, qwen = (32, 8, 128), (16, 8, 128)
    for batch in (16, 64, 256):
        mark = DECODE_MARK if batch >= 64 else None
        yield Step(f"decode, Llama 3.1 8B: {batch} x 1k", (Row(1024),) * batch, *llama, mark, beside=True)
    yield Step("decode, Qwen3 0.6B: 256 x 1k", (Row(1024),) * 256, *qwen, DECODE_MARK, beside=True)
    yield Step("decode, SmolLM2: 256 x 1k", (Row(1024),) * 256, 9, 3, 64)
    yield Step("decode, Gemma 3: 128 x 1k", (Row(1024),) * 128, 8, 4, 256)
    uneven = tuple(Row(256 + 6 * number) for number in range(256))
    yield Step("decode, Llama 3.1 8B: 256 of 256 to 1.8k", uneven, *llama, DECODE_MARK)
    yield Step("decode, Llama 3.1 8B: 8 x 16k", (Row(16384),) * 8, *llama)
    for stored in (torch.int8, torch.float8_e4m3fn):
        name = f"decode over {str(stored).removeprefix('torch.')}: 256 x 1k"
        yield Step(name, (Row(1024),) * 256, *llama, stored=stored)
    shared = tuple(Row(1024, shared=32) for _ in range(256))
    yield Step("decode, half of 1k shared: 256 x 1k", shared, *llama)
    yield Step("prefill, Llama 3.1 8B: 4k", (Row(4096, new=4096),), *llama, PREFILL_MARK, beside=True)
    yield Step("prefill, Llama 3.1 8B: 4 x 1k", (Row(1024, new=1024),) * 4, *llama, beside=True)
    yield Step("prefill, Qwen3 0.6B: 4k", (Row(4096, new=4096),), *qwen, PREFILL_MARK, beside=True)
    yield Step("prefill, 2k behind 6k", (Row(8192, new=2048),), *llama)


def _measure(step: Step, setting: Setting, findings: Findings) -> None:
    random = setting.generator(step.name)
    dtype = setting.sixteen
    made = paged(step.rows, step.kv_heads, step.head_dim, step.stored or dtype, random, LAYERS)
    query = wide_query(made, step.heads, dtype, random)
    scale = step.head_dim**-0.5
    kind = kernel.kind_of(query, made.memory[:, 0])
    planned = kernel.plan_rows(made.packed, step.heads // step.kv_heads, kind, None)
    plan = kernel.DevicePlan.of(planned, setting.device)

    def attend(layer: int) -> Tensor:
        scales = made.scales_of(layer)
        return kernel.attend(query, made.memory[:, layer], plan, scale, scales=scales)

    check = _compared(step, setting, made, query, attend)
    findings.checks.append(check)
    if not check.ok:
        return

    def all_layers() -> None:
        for layer in range(LAYERS):
            attend(layer)

    time = _each(clocked(setting, all_layers))
    theirs = _torch_times(step, setting, made, query, findings) if step.beside else {}
    findings.figures += _figures(step, setting, made, query, time, theirs)


def _compared(
    step: Step, setting: Setting, made: Paged, query: Tensor, attend: Callable[[int], Tensor]
) -> Check:
    """Some rows of one layer, the last among them; of a long run of tokens its last 64."""
    with broken(setting.fault, step.name) as spoilt, poisoned():
        (found,) = spoilt((attend(1),))
    count = len(step.rows)
    chosen = sorted(
        {number * (count - 1) // COMPARED for number in range(COMPARED)} | {count - 1, count // 2}
    )
    starts = [sum(row.new for row in step.rows[:number]) for number in chosen]
    tail = [min(step.rows[number].new, 64) for number in chosen]
    ends = [start + step.rows[number].new for start, number in zip(starts, chosen, strict=True)]
    places = [place for end, new in zip(ends, tail, strict=True) for place in range(end - new, end)]
    short = Paged(
        tuple(Row(step.rows[number].length, new) for number, new in zip(chosen, tail, strict=True)),
        made.memory,
        made.scales,
        tuple(made.tables[number] for number in chosen),
        made.head_dim,
    )
    if found.isnan().any():
        return Check(step.name, False, None, f"{int(found.isnan().sum())} numbers were not written")
    expected = attention(query[places], short, step.head_dim**-0.5, layer=1)
    return compare(step.name, [found[places]], [expected], [ROUNDED[query.dtype]])


def _each(time: Time) -> Time:
    return Time(time.ms / LAYERS, time.spread, time.runs)


def _torch_times(
    step: Step, setting: Setting, made: Paged, query: Tensor, findings: Findings
) -> dict[str, Time]:
    """Of each backend that takes these shapes; rows are of one length, and all of it is new or one token."""
    rows, row = len(step.rows), step.rows[0]
    layers = []
    for layer in range(LAYERS):
        dense = [made.dense(number, layer) for number in range(rows)]
        keys, values = (torch.stack([pair[kind] for pair in dense]).to(query.dtype) for kind in (0, 1))
        layers.append((keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()))
        del dense
    mine = query.reshape(rows, row.new, step.heads, step.head_dim).transpose(1, 2).contiguous()

    def attend(layer: int) -> Tensor:
        return scaled_dot_product_attention(
            mine, *layers[layer], is_causal=not step.decoding, enable_gqa=True
        )

    def all_layers() -> None:
        for layer in range(LAYERS):
            attend(layer)

    times = {}
    expected = attention(query, made, step.head_dim**-0.5, layer=1, only=[0])
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                found = attend(1)[0].transpose(0, 1)
                # So that what ours is compared with is attention over the same numbers.
                check = compare(f"{step.name}, torch's {name}", [found], [expected], [ROUNDED[query.dtype]])
                if check.ok:
                    times[name] = _each(clocked(setting, all_layers))
                else:
                    findings.checks.append(check)
        except RuntimeError:
            continue
    return times


def _figures(
    step: Step, setting: Setting, made: Paged, query: Tensor, time: Time, theirs: dict[str, Time]
) -> list[Figure]:
    name, copy = f"attention, {step.name}", setting.facts.get("copy")
    found = []
    if step.decoding:
        whole = made.bytes_read() + 2 * query.numel() * query.element_size()
        rate = whole / time.seconds
        # Where rows share, more is read than there is: a share above 1 is what sharing saves.
        found.append(
            Figure(
                name,
                rate / 1e12,
                "TB/s",
                "copy",
                rate / copy if copy else None,
                step.mark,
                ms=time.ms,
                spread=time.spread,
            )
        )
    else:
        rate = _operations(step.rows, step.heads, step.head_dim) / time.seconds
        peak = setting.facts.get("bf16")
        share = rate / peak if peak else None
        found.append(Figure(name, rate / 1e12, "TFLOP/s", "bf16", share, ms=time.ms, spread=time.spread))
    if theirs:
        best = min(theirs, key=lambda backend: theirs[backend].ms)
        for backend in dict.fromkeys(("flash", best)):
            if backend in theirs:
                other = theirs[backend]
                flash = backend == "flash" and not step.decoding
                found.append(
                    Figure(
                        f"  beside torch's {backend}{', its fastest' if backend == best else ''}",
                        other.ms,
                        "ms",
                        "its speed",
                        other.ms / time.ms,
                        step.mark if flash else None,
                        spread=other.spread,
                    )
                )
    return found


def _operations(rows: Sequence[Row], heads: int, head_dim: int) -> float:
    """Products and sums of scores and of weighted values, of what is seen."""
    seen = sum(row.new * (row.length - row.new) + row.new * (row.new + 1) / 2 for row in rows)
    return 4.0 * heads * head_dim * seen
