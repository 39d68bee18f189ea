"""Paged attention on a CUDA device: three Triton kernels over the layout of cache_write.py.

Rows of one token go over their keys in splits of fixed size, in a tile of 16 rows that is no more than the
query heads of one kv head, or in one of 64 for rows with a common prefix; a second kernel combines the
splits. Rows of more tokens go in tiles large enough for the matrix unit of a Hopper card (wgmma, from 64
rows on). What a token's result is does not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagemill.kernels.attention_triton_kernel import attend_splits, attend_tiles, combine_splits
from pagemill.kernels.attention_triton_plan import (
    NO_WINDOW,
    SMALL_TILE,
    SPLIT,
    Int32s,
    Sizes,
    StepPlan,
    plan_step,
)
from pagemill.kernels.packed_rows import PackedRows
from pagemill.kernels.variants import FP_FUSION, Variant

# Counts lie before the sections of a plan, which begin at multiples of 16 integers.
ALIGNMENT = 16
COMBINE_WARPS, COMBINE_STAGES = 2, 2
RECORD_WORDS = {"small_items": 4, "large_items": 4, "rows": 8, "tiles": 4, "table_blocks": 1}
COUNTS = {"small_items": 0, "large_items": 1, "rows": 2, "tiles": 3}


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: of queries. keys: taken at a time. warps, stages: of a thread block and of its loads."""

    rows: int
    keys: int
    warps: int
    stages: int


def split_tile(head_dim: int, bytes_each: int, rows: int) -> Tile:
    """For rows of one token; rows: SMALL_TILE, or large_rows() of it. bytes_each: of a number of a query."""
    wide = head_dim > 128
    if bytes_each == 4:
        return Tile(rows, 16 if wide else 32, 4, 3)
    # One stage goes to the block table, which is read ahead of what it leads to.
    if rows == SMALL_TILE:
        return Tile(rows, 32, 8, 4) if wide else Tile(rows, 64, 4, 4)
    return Tile(rows, 16 if wide else 32, 8, 4)


def large_rows(bytes_each: int) -> int:
    """Rows of an item of several rows with a common prefix. Products of 32-bit numbers have no matrix unit,
    and a tile that large would not fit into registers."""
    return SMALL_TILE if bytes_each == 4 else 64


def run_tile(head_dim: int, bytes_each: int) -> Tile:
    """For rows of more tokens."""
    wide = head_dim > 128
    if bytes_each == 4:
        return Tile(SMALL_TILE, 16 if wide else 32, 4, 3)
    return Tile(128, 32, 8, 2) if wide else Tile(128, 64, 8, 3)


class DevicePlan:
    """The integers of a step on the device. At addresses that stay, filled again for each step, it serves a
    captured graph, whose grids depend on `sizes` only."""

    def __init__(self, sizes: Sizes, words: Tensor) -> None:
        """words: int32 [plan_words(sizes)] on the device."""
        self.sizes = sizes
        self._device = words
        self._places, _ = _plan_places(sizes)

    @staticmethod
    def of(plan: StepPlan, device: torch.device) -> DevicePlan:
        """One for this step alone, copied in order with what the current stream does."""
        host = torch.from_numpy(plan_to_words(plan, plan.sizes))
        if device.type == "cuda":
            host = host.pin_memory()
        return DevicePlan(plan.sizes, host.to(device, non_blocking=True))

    def section(self, name: str) -> Tensor:
        start, end = self._places[name]
        return self._device[start:end]

    def count(self, name: str) -> Tensor:
        return self._device[COUNTS[name] :]


def _plan_places(sizes: Sizes) -> tuple[dict[str, tuple[int, int]], int]:
    """Where each section begins and ends, and how many words there are in all."""
    places: dict[str, tuple[int, int]] = {}
    end = ALIGNMENT
    for name, words in RECORD_WORDS.items():
        size = getattr(sizes, name) * words
        places[name] = (end, end + size)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places, end


def plan_words(sizes: Sizes) -> int:
    return _plan_places(sizes)[1]


def plan_to_words(plan: StepPlan, sizes: Sizes) -> Int32s:
    """A step as the words that a DevicePlan of these sizes reads. Raises ValueError where it is larger."""
    if not sizes.hold(plan.sizes):
        raise ValueError(f"a step of {plan.sizes} does not fit a plan of {sizes}")
    places, end = _plan_places(sizes)
    words = np.zeros(end, np.int32)
    for name, place in COUNTS.items():
        words[place] = getattr(plan.sizes, name)
    for name, (start, _) in places.items():
        records = np.ravel(plan.tables if name == "table_blocks" else getattr(plan, name))
        words[start : start + len(records)] = records
    return words


def plan_key(group: int, head_dim: int, bytes_each: int, window: int | None) -> tuple[object, ...]:
    """Under what PackedRows keep a plan; whoever puts one there beforehand saves its copy."""
    return ("triton", group, head_dim, bytes_each, window)


def paged_attention(
    query: Tensor,
    layer: Tensor,
    rows: PackedRows,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """See attention.py. scales: for a layer of 8-bit numbers, what those of each token are to be multiplied
    by [blocks, 2, kv_heads, 16] in float32."""
    group = query.shape[1] // layer.shape[2]
    size = query.element_size()

    def on_device() -> DevicePlan:
        return DevicePlan.of(plan_rows(rows, group, query.shape[2], size, window), layer.device)

    plan = rows.once(plan_key(group, query.shape[2], size, window), on_device)
    return attend(query, layer, plan, scale, window=window, softcap=softcap, scales=scales)


def plan_rows(rows: PackedRows, group: int, head_dim: int, bytes_each: int, window: int | None) -> StepPlan:
    """A step for `plan_to_words`. group: query heads of a kv head. bytes_each: of a number of a query."""
    return plan_step(rows, group, window, run_tile(head_dim, bytes_each).rows, large_rows(bytes_each))


def attend(
    query: Tensor,
    layer: Tensor,
    plan: DevicePlan,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Attention of a step that is planned already; what is launched depends on shapes and `plan.sizes` only,
    so it can be captured. Raises ValueError for shapes that no kernel has."""
    tokens, heads, head_dim = query.shape
    kv_heads = layer.shape[2]
    group = heads // kv_heads
    if head_dim % 16 or head_dim > 256 or group > SMALL_TILE:
        raise ValueError(f"there is no kernel for head_dim {head_dim} with {group} query heads a kv head")
    if query.stride(2) != 1:
        query = query.contiguous()
    out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    sizes = plan.sizes
    shape = {"GROUP": group, "HEAD_DIM": head_dim, "D": padded(head_dim)}
    modes = {"SOFTCAP": softcap is not None, "SCALED": scales is not None}
    common = {
        "query_token": query.stride(0),
        "query_head": query.stride(1),
        "out_token": out.stride(0),
        "out_head": out.stride(1),
        "block_stride": layer.stride(0),
        "kind_stride": layer.stride(1),
        "head_stride": layer.stride(2),
        "scale_stride": 0 if scales is None else scales.stride(0),
        "kv_heads": kv_heads,
        "window": window or NO_WINDOW,
        "scale": scale,
        "softcap": 1.0 if softcap is None else softcap,
    }
    tables = plan.section("table_blocks")
    if sizes.tiles:
        tile = run_tile(head_dim, query.element_size())
        attend_tiles[(sizes.tiles, kv_heads)](
            query, out, layer, scales, plan.section("tiles"), plan.count("tiles"), tables,
            **common, **shape, **modes, **_launch(tile), WINDOWED=window is not None,
        )  # fmt: skip
    if not sizes.rows:
        return out
    parts = torch.empty((sizes.parts, heads, head_dim), dtype=torch.float32, device=query.device)
    totals = torch.empty((sizes.parts, heads), dtype=torch.float32, device=query.device)
    for name, height in (("small_items", SMALL_TILE), ("large_items", large_rows(query.element_size()))):
        programs = getattr(sizes, name)
        if programs:
            tile = split_tile(head_dim, query.element_size(), height)
            attend_splits[(programs, kv_heads)](
                query, out, parts, totals, layer, scales,
                plan.section(name), plan.count(name), plan.section("rows"), tables,
                **common, **shape, **modes, **_launch(tile), SPLIT=SPLIT,
            )  # fmt: skip
    if sizes.parts:
        combine_splits[(sizes.rows, heads)](
            out, parts, totals, plan.section("rows"), plan.count("rows"), out.stride(0), out.stride(1),
            HEAD_DIM=head_dim, D=padded(head_dim), num_warps=COMBINE_WARPS, num_stages=COMBINE_STAGES,
            enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
    return out


def padded(head_dim: int) -> int:
    """The width of a tile: a power of two."""
    return 1 << (head_dim - 1).bit_length()


def _launch(tile: Tile) -> dict[str, int | bool]:
    return {
        "M": tile.rows,
        "N": tile.keys,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": FP_FUSION,
    }


# Head dim, query heads a kv head, softcap, window: of SmolLM2, Phi-2, Phi-3, Qwen3 0.6B, Llama 3.1 8B,
# Mistral, Qwen2.5 7B, Llama 3 70B, Gemma 2 and Gemma 3.
SHAPES = (
    (64, 3, False, False),
    (80, 1, False, False),
    (96, 1, False, True),
    (128, 2, False, False),
    (128, 4, False, False),
    (128, 4, False, True),
    (128, 7, False, False),
    (128, 8, False, False),
    (256, 2, True, True),
    (256, 2, False, True),
)
# Query and memory, the shapes that are compiled for them, and on what: cards before Hopper have no e4m3.
DTYPES: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...]], ...] = (
    ("bf16", "bf16", tuple(range(10)), (80, 90, 100)),
    ("fp16", "fp16", (0, 4, 8), (80, 90, 100)),
    ("fp32", "fp32", (0, 4, 8), (80, 90, 100)),
    ("bf16", "i8", (0, 4, 8), (80, 90, 100)),
    ("bf16", "fp8e4nv", (4, 8), (90, 100)),
)
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def variants() -> list[Variant]:
    found = [_combine_variant("bf16", head_dim) for head_dim in (64, 80, 128, 256)]
    found.append(_combine_variant("fp32", 64))
    for dtype, kv, shapes, targets in DTYPES:
        for shape in shapes:
            head_dim, group, softcap, windowed = SHAPES[shape]
            tile = run_tile(head_dim, BYTES[dtype])
            found.append(_variant(attend_tiles, dtype, kv, shape, tile, targets, {"WINDOWED": windowed}))
            if (head_dim, group, softcap) in [known[:3] for known in SHAPES[:shape]]:
                continue  # rows of one token have one kernel for any window
            for height in sorted({SMALL_TILE, large_rows(BYTES[dtype])}):
                tile = split_tile(head_dim, BYTES[dtype], height)
                found.append(_variant(attend_splits, dtype, kv, shape, tile, targets, {"SPLIT": SPLIT}))
    return found


def _variant(
    kernel: Any,
    dtype: str,
    kv: str,
    shape: int,
    tile: Tile,
    targets: tuple[int, ...],
    more: dict[str, object],
) -> Variant:
    head_dim, group, softcap, _ = SHAPES[shape]
    scaled = kv != dtype
    signature = {
        "query": f"*{dtype}:16",
        "out": f"*{dtype}:16",
        "parts": "*fp32:16",
        "part_totals": "*fp32:16",
        "layer": f"*{kv}:16",
        "scales": "*fp32:16",
        "items": "*i32:16",
        "tiles": "*i32:16",
        "count": "*i32",
        "rows": "*i32:16",
        "tables": "*i32:16",
        **dict.fromkeys(STRIDES, "i32:16"),
        "kv_heads": "i32",
        "window": "i32",
        "scale": "fp32",
        "softcap": "fp32",
    }
    constexprs = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "D": padded(head_dim),
        "M": tile.rows,
        "N": tile.keys,
        "SOFTCAP": softcap,
        "SCALED": scaled,
        **more,
    }
    if not scaled:
        constexprs["scales"] = None
    names = kernel.arg_names
    kept = {name: kind for name, kind in signature.items() if name in names and name not in constexprs}
    title = f"{dtype}{f'-kv-{kv}' if scaled else ''}-d{head_dim}-g{group}-m{tile.rows}"
    title += ("-softcap" if softcap else "") + ("-window" if more.get("WINDOWED") else "")
    return Variant(kernel, title, kept, constexprs, tile.warps, tile.stages, targets)


STRIDES = (
    "query_token",
    "query_head",
    "out_token",
    "out_head",
    "block_stride",
    "kind_stride",
    "head_stride",
    "scale_stride",
)


def _combine_variant(dtype: str, head_dim: int) -> Variant:
    signature = {
        "out": f"*{dtype}:16",
        "parts": "*fp32:16",
        "part_totals": "*fp32:16",
        "rows": "*i32:16",
        "count": "*i32",
        "out_token": "i32:16",
        "out_head": "i32:16",
    }
    constexprs = {"HEAD_DIM": head_dim, "D": padded(head_dim)}
    name = f"{dtype}-d{head_dim}"
    return Variant(combine_splits, name, signature, constexprs, COMBINE_WARPS, COMBINE_STAGES)
