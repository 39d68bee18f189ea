"""Paged attention against float64: decode, prefill, both in one step, shared prefixes, 8-bit memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from gpu_check.case import Case, Trial
from gpu_check.compare import ROUNDED, Tolerance
from gpu_check.paged import Row, attention, paged, wide_query
from gpu_check.setting import DTYPE_NAMES, Setting
from pagemill.kernels import attention_triton as kernel
from pagemill.kernels.attention_triton_plan import SPLIT, Sizes


@dataclass(frozen=True, slots=True)
class Shape:
    """group: query heads of a kv head."""

    name: str
    head_dim: int
    group: int
    kv_heads: int = 2
    window: int | None = None
    softcap: float | None = None


SHAPES = (
    Shape("SmolLM2", 64, 3),
    Shape("Phi-2", 80, 1),
    Shape("Phi-3", 96, 1, window=100),
    Shape("Qwen3 0.6B", 128, 2),
    Shape("Llama 3.1 8B", 128, 4),
    Shape("Mistral", 128, 4, window=300),
    Shape("Qwen2.5 7B", 128, 7),
    Shape("Llama 3 70B", 128, 8),
    Shape("Gemma 2", 256, 2, window=300, softcap=50.0),
    Shape("Gemma 3", 256, 2, window=64),
)
# Borders of blocks, of tiles and of splits, all in one step.
MIXED = (
    *(Row(length) for length in (1, 15, 17, 63, SPLIT - 1, SPLIT, SPLIT + 1, 3 * SPLIT + 7)),
    *(Row(*run) for run in ((2, 2), (16, 16), (33, 17), (65, 65), (200, 130), (5 * SPLIT, 300), (40, 2))),
)
SHARED = (
    *(Row(2 * SPLIT + 16 + own, shared=2 * SPLIT // 16 + 1) for own in (1, 5, 16, 60, 300)),
    Row(2 * SPLIT + 90, new=70, shared=2 * SPLIT // 16),
    Row(30),
)
# A cap times the rounding of a hyperbolic tangent, which 16 bits hide.
CAPPED = Tolerance(1e-4, 1e-4, 1e-4)
# What one plan holds that serves all of these steps.
LARGEST = Sizes(90, 30, 20, 40, 90, 900)
DRY_SHAPE = Shape("tiny", 16, 2, kv_heads=1)
DRY_MIXED = (Row(1), Row(SPLIT + 1), Row(5, new=5), Row(20, new=4))
DRY_SHARED = (*(Row(SPLIT + own, shared=SPLIT // 16) for own in (1, 20)), Row(9))


def cases(setting: Setting) -> Iterator[Case]:
    if setting.dry:
        yield _case("mixed", DRY_SHAPE, DRY_MIXED, torch.float32)
        yield _case("mixed", replace(DRY_SHAPE, window=70, softcap=20.0), DRY_MIXED, torch.float16)
        yield _case("shared prefix", DRY_SHAPE, DRY_SHARED, torch.float16)
        for stored in (torch.int8, torch.float8_e4m3fn):
            yield _case("8-bit memory", DRY_SHAPE, DRY_MIXED, torch.float16, stored)
        yield _refilled(DRY_SHAPE, (DRY_MIXED, DRY_SHARED), torch.float16)
        return
    for shape in SHAPES:
        for dtype in setting.dtypes:
            yield _case("mixed", shape, MIXED, dtype)
            yield _case("shared prefix", shape, SHARED, dtype)
    for shape in (SHAPES[0], SHAPES[4], SHAPES[8]):
        yield _case("mixed", shape, MIXED, torch.float32)
        yield _case("shared prefix", shape, SHARED, torch.float32)
        for stored in (torch.int8, torch.float8_e4m3fn):
            yield _case("8-bit memory", shape, MIXED, torch.bfloat16, stored)
            yield _case("8-bit memory, shared prefix", shape, SHARED, torch.bfloat16, stored)
    for group in (1, 5, 6):
        yield _case("mixed", Shape(f"group {group}", 128, group), MIXED, torch.bfloat16)
    yield _refilled(SHAPES[4], (MIXED, SHARED, MIXED[:3]), torch.bfloat16)


def _case(
    what: str,
    shape: Shape,
    rows: tuple[Row, ...],
    dtype: torch.dtype,
    stored: torch.dtype | None = None,
) -> Case:
    names = DTYPE_NAMES[dtype] + (f" over {str(stored).removeprefix('torch.')}" if stored else "")
    modes = {"window": shape.window, "softcap": shape.softcap}

    def make(random: torch.Generator) -> Trial:
        made = paged(rows, shape.kv_heads, shape.head_dim, stored or dtype, random)
        # Scores that a softcap of 50 bends.
        spread = 4.0 if shape.softcap else 1.0
        query = wide_query(made, shape.group * shape.kv_heads, dtype, random, spread)
        scale = shape.head_dim**-0.5

        def run() -> tuple[torch.Tensor]:
            layer, scales = made.memory[:, 1], made.scales_of(1)
            packed = made.packed_as(share=True)
            return (kernel.paged_attention(query, layer, packed, scale, scales=scales, **modes),)

        how = CAPPED if shape.softcap and dtype == torch.float32 else ROUNDED[dtype]
        return Trial(run, lambda: (attention(query, made, scale, layer=1, **modes),), [how])

    return Case(f"attention, {what}: {shape.name} {names}", make)


def _refilled(shape: Shape, steps: tuple[tuple[Row, ...], ...], dtype: torch.dtype) -> Case:
    """As a captured graph has it: one plan, larger than any of its steps, filled again for each."""

    def make(random: torch.Generator) -> Trial:
        all_made = [paged(rows, shape.kv_heads, shape.head_dim, dtype, random) for rows in steps]
        heads, scale = shape.group * shape.kv_heads, shape.head_dim**-0.5
        queries = [wide_query(made, heads, dtype, random) for made in all_made]

        def run() -> tuple[torch.Tensor, ...]:
            words = torch.empty(kernel.plan_words(LARGEST), dtype=torch.int32, device=random.device)
            plan, found = kernel.DevicePlan(LARGEST, words), []
            for made, query in zip(all_made, queries, strict=True):
                kind = kernel.kind_of(query, made.memory[:, 0])
                step = kernel.plan_rows(made.packed, shape.group, kind, None)
                words.copy_(torch.from_numpy(kernel.plan_to_words(step, LARGEST)))
                found.append(kernel.attend(query, made.memory[:, 0], plan, scale))
            return tuple(found)

        def expected() -> tuple[torch.Tensor, ...]:
            pairs = zip(all_made, queries, strict=True)
            return tuple(attention(query, made, scale) for made, query in pairs)

        return Trial(run, expected, [ROUNDED[dtype]] * len(steps))

    return Case(f"attention, one plan for all steps: {shape.name} {DTYPE_NAMES[dtype]}", make)
