"""Paged attention in torch: a reference that is obviously right, and a packed form for any CPU.

The packed form serves where attention_cpu.py cannot. It treats the two kinds of rows apart. Rows with one
query (decode) go in groups of like length, each group as one batched product over gathered blocks: no
Python per row. Rows with many queries (prefill) go one by one over their true length, where the arithmetic
dwarfs the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill.kernels.cache_write import BLOCK_SIZE, keys_of, values_of
from pagemill.kernels.packed_rows import PackedRows, blocks_for

# A group of decode rows gathers its blocks into scratch memory of about this size: what stays in a core's
# cache is read back several times faster than what goes through memory (64 rows of 112 tokens, 3 kv heads
# of 64 in float32, one thread of an EPYC 7003: 1.8 ms a layer in groups of 2.6 MB, 2.4 in 5 MB, 3.8 in one).
GROUP_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows with one query each, padded to the longest of them.

    tokens: their places in the packed matrix [rows]. chunks: what to gather, first keys, then values, as
    indices [2 * rows * kv_heads * width] into a layer seen as chunks of one head and block each. hidden:
    True where a row does not see a key [rows, 1, 1, width * 16].
    """

    tokens: Tensor
    chunks: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row with several queries at [start, stop) of the packed matrix, over `length` keys.

    visible: [queries, length], or None where the row starts at its first token and plain causality holds.
    """

    start: int
    stop: int
    length: int
    blocks: Tensor
    visible: Tensor | None


@dataclass(frozen=True, slots=True)
class TorchPlan:
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillRow, ...]


def reference_attention(
    query: Tensor,
    layer: Tensor,
    rows: PackedRows,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The same as `paged_attention`, query by query and head by head, in float64."""
    heads, head_dim = query.shape[1:]
    keys, values = keys_of(layer, head_dim), values_of(layer, head_dim)
    group = heads // keys.shape[1]
    out = torch.empty_like(query)
    token = 0
    for new, length, table in zip(rows.query_lengths, rows.lengths, rows.block_tables, strict=True):
        for position in range(length - new, length):
            first = 0 if window is None else max(0, position - window + 1)
            places = [(table[p // BLOCK_SIZE], p % BLOCK_SIZE) for p in range(first, position + 1)]
            for head in range(heads):
                k = torch.stack([keys[block, head // group, :, offset] for block, offset in places]).double()
                v = torch.stack([values[block, head // group, offset] for block, offset in places]).double()
                scores = _capped(k @ query[token, head].double() * scale, softcap)
                out[token, head] = (scores.softmax(0) @ v).to(query.dtype)
            token += 1
    return out


def paged_attention(
    query: Tensor,
    layer: Tensor,
    rows: PackedRows,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See attention.py. Blocks must have been cleared before their first token (`clear_blocks`)."""
    plan = rows.once(("torch", window), lambda: _plan(rows, layer, window))
    out = torch.empty_like(query)
    chunks = _chunks(layer)
    for group in plan.decode:
        out[group.tokens] = _decode(query[group.tokens], chunks, layer.shape[2], group, scale, softcap)
    for row in plan.prefill:
        out[row.start : row.stop] = _prefill(query[row.start : row.stop], layer, row, scale, softcap)
    return out


def _plan(rows: PackedRows, layer: Tensor, window: int | None) -> TorchPlan:
    decoding: list[tuple[int, int, Sequence[int]]] = []  # length, token, table
    prefill: list[PrefillRow] = []
    token = 0
    for new, length, table in zip(rows.query_lengths, rows.lengths, rows.block_tables, strict=True):
        if new == 1:
            decoding.append((length, token, table))
        else:
            prefill.append(_plan_prefill(token, new, length, table, window))
        token += new
    return TorchPlan(tuple(_plan_decode(decoding, layer, window)), tuple(prefill))


def _plan_prefill(token: int, new: int, length: int, table: Sequence[int], window: int | None) -> PrefillRow:
    blocks = torch.tensor(table[: blocks_for(length)], dtype=torch.int64)
    visible = None
    if new < length or (window is not None and window < length):
        visible = torch.ones(new, length, dtype=torch.bool).tril_(length - new)
        if window is not None:
            visible.triu_(length - new - window + 1)
    return PrefillRow(token, token + new, length, blocks, visible)


def _plan_decode(
    rows: list[tuple[int, int, Sequence[int]]], layer: Tensor, window: int | None
) -> list[DecodeGroup]:
    """Longest first, so that rows of like length share a group and little of it is padding."""
    rows.sort(key=lambda row: -row[0])
    most_blocks = max(1, GROUP_BYTES // (layer[0].numel() * layer.element_size()))
    groups = []
    start = 0
    while start < len(rows):
        width = blocks_for(rows[start][0])
        stop = min(len(rows), start + max(1, most_blocks // width))
        groups.append(_decode_group(rows[start:stop], width, layer, window))
        start = stop
    return groups


def _decode_group(
    rows: list[tuple[int, int, Sequence[int]]], width: int, layer: Tensor, window: int | None
) -> DecodeGroup:
    blocks: list[int] = []
    for length, _, table in rows:
        used = blocks_for(length)
        blocks.extend(table[:used])
        # Padding repeats the row's own last block: a block of another row might hold NaN.
        blocks.extend([table[used - 1]] * (width - used))
    kv_heads, chunk = layer.shape[2:]
    first = torch.tensor(blocks).view(1, len(rows), 1, width) * (layer.stride(0) // chunk)
    kind_and_head = torch.arange(2 * kv_heads).view(2, 1, kv_heads, 1)
    lengths = torch.tensor([length for length, _, _ in rows])[:, None]
    keys = torch.arange(width * BLOCK_SIZE)
    hidden = keys >= lengths
    if window is not None:
        hidden |= keys < lengths - window
    return DecodeGroup(
        tokens=torch.tensor([token for _, token, _ in rows]),
        chunks=(first + kind_and_head).flatten(),
        hidden=hidden[:, None, None],
    )


def _chunks(layer: Tensor) -> Tensor:
    """A layer [blocks, 2, kv_heads, n] as rows [chunks, n], with those of other layers between its own.

    In this form one gather puts every head's blocks side by side, where a gather of whole blocks would have
    to be copied once more.
    """
    kinds, kv_heads, chunk = layer.shape[1:]
    count = (layer.shape[0] - 1) * (layer.stride(0) // chunk) + kinds * kv_heads
    return layer.as_strided((count, chunk), (chunk, 1), layer.storage_offset())


def _decode(
    query: Tensor, chunks: Tensor, kv_heads: int, group: DecodeGroup, scale: float, softcap: float | None
) -> Tensor:
    """query [rows, heads, head_dim], one token each."""
    rows, heads, head_dim = query.shape
    gathered = chunks.index_select(0, group.chunks).view(2, rows, kv_heads, -1, chunks.shape[1])
    keys = gathered[0].view(rows, kv_heads, -1, head_dim, BLOCK_SIZE)
    values = gathered[1].view(rows, kv_heads, -1, head_dim)  # [rows, kv_heads, keys, head_dim]
    packed = (query * scale).view(rows, kv_heads, 1, heads // kv_heads, head_dim)
    scores = _capped(torch.matmul(packed, keys), softcap)  # [rows, kv_heads, blocks, group, 16]
    scores = scores.transpose(2, 3).flatten(3).masked_fill_(group.hidden, -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, values).view(rows, heads, head_dim)


def _prefill(query: Tensor, layer: Tensor, row: PrefillRow, scale: float, softcap: float | None) -> Tensor:
    """query [queries, heads, head_dim] of one row."""
    queries, heads, head_dim = query.shape
    kv_heads = layer.shape[2]
    gathered = layer.index_select(0, row.blocks)
    keys = keys_of(gathered, head_dim).permute(1, 0, 3, 2).flatten(1, 2)[:, : row.length]
    values = values_of(gathered, head_dim).transpose(0, 1).flatten(1, 2)[:, : row.length]
    # kv heads as the batch and the query heads of each as its heads: keys and values are then shared by a
    # stride of zero, where enable_gqa would leave the fast path.
    shared = (kv_heads, heads // kv_heads, row.length, head_dim)
    query = query.view(queries, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    keys, values = keys.unsqueeze(1).expand(shared), values.unsqueeze(1).expand(shared)
    if softcap is None:
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=row.visible, is_causal=row.visible is None, scale=scale
        )
    else:
        visible = row.visible
        if visible is None:
            visible = torch.ones(queries, row.length, dtype=torch.bool).tril_()
        scores = _capped(torch.matmul(query * scale, keys.transpose(2, 3)), softcap)
        scores.masked_fill_(~visible, -torch.inf)
        out = torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype), values)
    return out.permute(2, 0, 1, 3).reshape(queries, heads, head_dim)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap).mul_(softcap)
