"""Paged attention on CPU over block tables: one call for all rows of a step, decode and prefill alike.

The step is cut into items (attention_cpu_items.py); threads take the next one when they are done with one.
The compiled part (attention_cpu_kernel.py) does one item.  A query's result depends on its own query, keys
and values only: not on what else is in the step, how a prompt was cut into chunks, nor on the number of
threads, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.kernels import attention_cpu_words as words
from pagemill.kernels import cpu_threads
from pagemill.kernels.attention_cpu_items import NO_WINDOW, Int64s, Shape, plan_items
from pagemill.kernels.cache_write import BLOCK_SIZE
from pagemill.kernels.cpu_kinds import kind_of
from pagemill.kernels.cpu_program import Phase
from pagemill.kernels.packed_rows import PackedRows

LOG2E = 1.4426950408889634


@cache
def refusal(head_dim: int, *dtypes: torch.dtype) -> str | None:
    """Why this implementation cannot serve queries and memory of these dtypes; None if it can.

    The first call that is not refused imports numba, which takes half a second.
    """
    for dtype in dtypes:
        if dtype not in (torch.float32, torch.bfloat16):
            return f"it computes float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim % 16:
        return f"head_dim {head_dim} is not a multiple of 16"
    return cpu_threads.why_not_compiled()


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameter block of a step and where it lies, with what its addresses point to."""

    words: Int64s
    address: int
    items: Int64s
    tiles: Int64s
    tables: npt.NDArray[np.int32]
    scratch: Tensor


def paged_attention(
    query: Tensor,
    layer: Tensor,
    rows: PackedRows,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    threads: int | None = None,
) -> Tensor:
    """See attention.py. threads: as many as torch is set to use, by default."""
    _, heads, head_dim = query.shape
    threads = threads or torch.get_num_threads()
    shape = Shape(heads // layer.shape[2], layer.shape[2], head_dim, layer.element_size())
    plan = plan_step(rows, shape, window, threads)
    if query.stride(2) != 1:
        query = query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype)
    _point(plan.words, query, out, layer)
    _set_scores(plan.words, scale, softcap)
    code = _code(words.small_rows(shape.group), query.dtype, layer.dtype)
    cpu_threads.run(code, plan.address, min(threads, len(plan.items)))
    return out


def plan_step(rows: PackedRows, shape: Shape, window: int | None, threads: int) -> Plan:
    """How a step is cut, once for all layers with this window; its words know no layer yet."""
    return rows.once(("cpu", shape, window, threads), lambda: _plan(rows, shape, window, threads))


def phase(
    query: Tensor, layer: Tensor, out: Tensor, scale: float, softcap: float | None, name: str = ""
) -> Phase:
    """One layer's attention as a part of a program, whose words want `plan_places` before each run.

    query, out [tokens, heads, head_dim]: of as many tokens as may come.
    """
    block = cpu_threads.aligned_words(words.WORDS)
    _point(block, query, out, layer)
    _set_scores(block, scale, softcap)
    small = words.small_rows(query.shape[1] // layer.shape[2])
    return Phase(_code(small, query.dtype, layer.dtype), block.tolist(), _fit, name)


def plan_places(plan: Plan) -> dict[int, int]:
    """The words that a step's plan makes; it must outlive the run."""
    return {place: int(plan.words[place]) for place in words.OF_A_PLAN}


def _fit(tokens: int) -> dict[int, int]:
    return {words.ITEM: 0, words.THREAD: 0}


@cache
def _code(small_rows: int, query: torch.dtype, layer: torch.dtype) -> int:
    # Here and not above: numba may be missing, and whoever asks nothing of it should not wait for it.
    from pagemill.kernels.attention_cpu_kernel import compile_attention
    from pagemill.kernels.cpu_vector import multiplies_bf16

    return compile_attention(small_rows, kind_of(layer, multiplies_bf16() and query == layer))


def _plan(rows: PackedRows, shape: Shape, window: int | None, threads: int) -> Plan:
    tables = rows.once("cpu tables", lambda: flat_tables(rows))
    items, tiles, scratch_rows = plan_items(rows, tables, shape, window or NO_WINDOW, threads)
    block = cpu_threads.aligned_words(words.WORDS)
    row_bytes = scratch_rows * shape.head_dim * 4
    block[words.SUMS] = row_bytes
    block[words.SCORES] = 2 * row_bytes
    block[words.TOTALS] = 2 * row_bytes + scratch_rows * words.SCORE_BYTES
    block[words.MAXIMA] = block[words.TOTALS] + scratch_rows * words.LINE
    block[words.PACKED] = _lines(int(block[words.MAXIMA]) + scratch_rows * 4)
    # A line between the scratch of two threads, and all of them at the start of a line.
    size = _lines(int(block[words.PACKED]) + words.WIDE * shape.head_dim * BLOCK_SIZE * 2) + words.LINE
    scratch = torch.empty(threads * size + words.LINE, dtype=torch.uint8)
    block[words.SCRATCH] = -(-scratch.data_ptr() // words.LINE) * words.LINE
    block[words.SCRATCH_BYTES] = size
    block[words.ITEMS], block[words.ITEM_LIST] = len(items), items.ctypes.data
    block[words.TILE_LIST], block[words.TABLES] = tiles.ctypes.data, tables.ctypes.data
    block[words.GROUP], block[words.HEAD_DIM] = shape.group, shape.head_dim
    block[words.WINDOW] = window or NO_WINDOW
    return Plan(block, block.ctypes.data, items, tiles, tables, scratch)


def _lines(size: int) -> int:
    """Bytes of whole cache lines."""
    return -(-size // words.LINE) * words.LINE


def flat_tables(rows: PackedRows) -> npt.NDArray[np.int32]:
    """The block tables of all rows, one behind another."""
    return np.fromiter(chain.from_iterable(rows.block_tables), np.int32, sum(map(len, rows.block_tables)))


def _point(block: Int64s, query: Tensor, out: Tensor, layer: Tensor) -> None:
    """Fills in where this call's tensors lie, and sets the counters back."""
    block[words.ITEM] = block[words.THREAD] = 0
    size = query.element_size()
    block[words.QUERY] = query.data_ptr()
    block[words.QUERY_TOKEN] = query.stride(0) * size
    block[words.QUERY_HEAD] = query.stride(1) * size
    block[words.OUT] = out.data_ptr()
    block[words.OUT_TOKEN] = out.stride(0) * size
    block[words.OUT_HEAD] = out.stride(1) * size
    block[words.HALF] = query.dtype == torch.bfloat16
    size = layer.element_size()
    block[words.LAYER] = layer.data_ptr()
    block[words.BLOCK_BYTES] = layer.stride(0) * size
    block[words.VALUES] = layer.stride(1) * size
    block[words.HEAD_BYTES] = layer.stride(2) * size


def _set_scores(block: Int64s, scale: float, softcap: float | None) -> None:
    """Weights are powers of two, so scores are scaled by log2(e) on top, before or behind the cap."""
    reals = block.view(np.float32)
    reals[2 * words.SCALE] = scale * LOG2E if softcap is None else scale / softcap
    reals[2 * words.SOFTCAP] = 0.0 if softcap is None else softcap * LOG2E
