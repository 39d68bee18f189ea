"""Attention of a packed step over paged keys and values: one signature, an implementation by device.

A step mixes rows that decode one token with rows that prefill many. Their queries lie packed in one
matrix; their keys and values lie in blocks named by each row's block table, already written by
`cache_write`. Query j of row i sees keys [0, lengths[i] - query_lengths[i] + j].
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pagemill.kernels import attention_torch
from pagemill.kernels.attention_torch import PackedRows
from pagemill.kernels.cache_write import BLOCK_SIZE

__all__ = ["PackedRows", "paged_attention", "plan_rows"]


def plan_rows(
    query_lengths: Sequence[int],
    lengths: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    layer: Tensor,
) -> PackedRows:
    """Describes the rows of a step once, for all its layers.

    query_lengths: tokens of each row in this step, >= 1. lengths: keys of each row with this step's included.
    block_tables: block ids of each row, enough to hold `lengths`. layer: any one of the storage's, for its
    shape.
    Raises ValueError where these contradict each other: attention over memory that holds nothing would
    not fail, it would answer wrongly.
    """
    _check_rows(query_lengths, lengths, block_tables)
    if layer.device.type != "cpu":
        raise ValueError(f"there is no attention for device {layer.device.type}")
    return attention_torch.plan_rows(query_lengths, lengths, block_tables, layer)


def paged_attention(query: Tensor, layer: Tensor, rows: PackedRows, scale: float) -> Tensor:
    """Causal attention; query [tokens, heads, head_dim], layer [blocks, 2, kv_heads, head_dim * 16].

    `heads` is a multiple of `kv_heads`: query head h reads kv head h // (heads / kv_heads). Returns
    [tokens, heads, head_dim] in query's dtype.
    """
    return attention_torch.paged_attention(query, layer, rows, scale)


def _check_rows(
    query_lengths: Sequence[int], lengths: Sequence[int], block_tables: Sequence[Sequence[int]]
) -> None:
    for i, (new, length, table) in enumerate(zip(query_lengths, lengths, block_tables, strict=True)):
        if not 1 <= new <= length:
            raise ValueError(f"row {i} has {new} new tokens of {length}")
        if len(table) * BLOCK_SIZE < length:
            raise ValueError(f"row {i} has {len(table)} blocks for {length} tokens")
