"""Paged attention on CPU over block tables: one call for all rows of a step, decode and prefill alike.

The step is cut into items, each a run of a row's tokens with one or more kv heads; threads take the next
item when they are done with one, longest first. The compiled part (attention_cpu_kernel.py) does one item.

A query's result depends on its own query, keys and values only: not on what else is in the step, how a
prompt was cut into chunks, nor on the number of threads, to the last bit.
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
from pagemill.kernels.packed_rows import PackedRows

Int64s = npt.NDArray[np.int64]

LOG2E = 1.4426950408889634
NO_WINDOW = 1 << 40
# Queries of a prefill item, times query heads of a kv head: enough that a block of keys fetched once is
# used many times, few enough that scores stay in a core's cache and that short prompts yield many items.
PREFILL_ROWS = 48
# Bytes of keys that a decode item reads at one place, if there are rows enough for all threads: memory
# streams adjacent heads faster than scattered ones (13 against 11 GB/s on one core of an EPYC 7003).
DECODE_BYTES = 16 << 10
# Items a thread should find at least before heads are taken together.
ITEMS_A_THREAD = 8


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
    shape = _Shape(heads // layer.shape[2], layer.shape[2], head_dim, layer.element_size())
    plan = rows.once(("cpu", shape, window, threads), lambda: _plan(rows, shape, window, threads))
    if query.stride(2) != 1:
        query = query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype)
    _point(plan.words, query, out, layer)
    _set_scores(plan.words, scale, softcap)
    half = layer.dtype == torch.bfloat16
    code = _code(words.small_rows(shape.group), half)
    cpu_threads.run(code, plan.address, min(threads, len(plan.items)))
    return out


@cache
def _code(small_rows: int, half: bool) -> int:
    # Here and not above: numba may be missing, and whoever asks nothing of it should not wait for it.
    from pagemill.kernels.attention_cpu_kernel import compile_attention

    return compile_attention(small_rows, int(half))


@dataclass(frozen=True, slots=True)
class _Shape:
    group: int
    kv_heads: int
    head_dim: int
    kv_bytes: int  # of one number


def _plan(rows: PackedRows, shape: _Shape, window: int | None, threads: int) -> Plan:
    items = _items(rows, shape, window or NO_WINDOW, threads)
    tables = rows.once("cpu tables", lambda: _flat_tables(rows))
    most_rows = _scratch_rows(items, shape.group)
    block = _aligned(words.WORDS)
    row_bytes = most_rows * shape.head_dim * 4
    block[words.SUMS] = row_bytes
    block[words.SCORES] = 2 * row_bytes
    block[words.TOTALS] = 2 * row_bytes + most_rows * words.SCORE_BYTES
    block[words.MAXIMA] = block[words.TOTALS] + most_rows * words.LINE
    # A line between the scratch of two threads, and all of them at the start of a line.
    size = -(-int(block[words.MAXIMA] + most_rows * 4) // words.LINE) * words.LINE + words.LINE
    scratch = torch.empty(threads * size + words.LINE, dtype=torch.uint8)
    block[words.SCRATCH] = -(-scratch.data_ptr() // words.LINE) * words.LINE
    block[words.SCRATCH_BYTES] = size
    block[words.ITEMS], block[words.ITEM_LIST] = len(items), items.ctypes.data
    block[words.TABLES] = tables.ctypes.data
    block[words.GROUP], block[words.HEAD_DIM] = shape.group, shape.head_dim
    block[words.WINDOW] = window or NO_WINDOW
    return Plan(block, block.ctypes.data, items, tables, scratch)


def _flat_tables(rows: PackedRows) -> npt.NDArray[np.int32]:
    return np.fromiter(chain.from_iterable(rows.block_tables), np.int32, sum(map(len, rows.block_tables)))


def _aligned(count: int) -> Int64s:
    """Zeroed words that begin at a cache line."""
    memory = np.zeros(count + 8, np.int64)
    start = -memory.ctypes.data % words.LINE // 8
    return memory[start : start + count]


def _items(rows: PackedRows, shape: _Shape, window: int, threads: int) -> Int64s:
    """[items, 8], the longest first."""
    new = np.array(rows.query_lengths, np.int64)
    length = np.array(rows.lengths, np.int64)
    tile = max(1, PREFILL_ROWS // shape.group)
    tiles = -(-new // tile)
    row = np.repeat(np.arange(len(new)), tiles)
    begin = (np.arange(len(row)) - (np.cumsum(tiles) - tiles)[row]) * tile
    tokens = np.minimum(tile, new[row] - begin)
    position = length[row] - new[row] + begin
    place = _starts(np.array([len(table) for table in rows.block_tables], np.int64))[row]
    columns = (_starts(new)[row] + begin, tokens, position, length[row], place)
    decoding = tokens == 1
    together = _heads_together(shape, int(decoding.sum()), threads)
    items = np.concatenate(
        [
            _with_heads([column[decoding] for column in columns], shape.kv_heads, together),
            _with_heads([column[~decoding] for column in columns], shape.kv_heads, 1),
        ]
    )
    cost = items[:, 1] * np.minimum(items[:, 2] + items[:, 1], window + items[:, 1]) * items[:, 6]
    return np.ascontiguousarray(items[np.argsort(-cost, kind="stable")])


def _starts(lengths: Int64s) -> Int64s:
    return np.cumsum(lengths) - lengths


def _with_heads(columns: list[Int64s], kv_heads: int, together: int) -> Int64s:
    """One item for each `together` kv heads of each tile."""
    parts = kv_heads // together
    items = np.zeros((len(columns[0]) * parts, words.ITEM_WORDS), np.int64)
    for i, column in enumerate(columns):
        items[:, i] = np.repeat(column, parts)
    items[:, 5] = np.tile(np.arange(parts) * together, len(columns[0]))
    items[:, 6] = together
    return items


def _heads_together(shape: _Shape, tokens: int, threads: int) -> int:
    """How many kv heads a decode item takes: a divisor of all of them."""
    head_bytes = shape.head_dim * 16 * shape.kv_bytes
    wanted = max(1, DECODE_BYTES // head_bytes)
    fitting = [
        n
        for n in range(1, shape.kv_heads + 1)
        if shape.kv_heads % n == 0
        and n <= wanted
        and tokens * (shape.kv_heads // n) >= ITEMS_A_THREAD * threads
    ]
    return max(fitting, default=1)


def _scratch_rows(items: Int64s, group: int) -> int:
    """Rows that the largest item needs, each head's rounded up to its register tiles."""
    small = words.small_rows(group)
    one = -(-group // small) * small * items[items[:, 1] == 1, 6].max(initial=0)
    many = -(-(items[:, 1].max() * group) // words.TILE_ROWS) * words.TILE_ROWS
    return int(max(one, many))


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
