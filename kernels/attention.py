"""Attention of a packed step over paged keys and values: one signature, an implementation by device.

A step mixes rows that decode one token with rows that prefill many. Their queries lie packed in one
matrix; their keys and values lie in blocks named by each row's block table, already written by
`cache_write`. Query j of row i sees keys [0, lengths[i] - query_lengths[i] + j], or the last `window` of
them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from pagemill.kernels import attention_cpu, attention_torch
from pagemill.kernels.choice import takes_triton
from pagemill.kernels.packed_rows import PackedRows

__all__ = ["PackedRows", "paged_attention", "plan_rows"]

logger = logging.getLogger(__name__)


def plan_rows(
    query_lengths: Sequence[int],
    lengths: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    layer: Tensor,
    share_prefixes: bool = True,
) -> PackedRows:
    """Describes the rows of a step once, for all its layers.

    query_lengths: tokens of each row in this step, >= 1. lengths: keys of each row with this step's included.
    block_tables: block ids of each row, enough to hold `lengths`; not to be changed during the step.
    layer: any one of the storage's, for its device. share_prefixes: whether blocks at the head of several
    tables may be read once for all of those rows, which changes no result. Raises ValueError where these
    contradict each other.
    """
    if layer.device.type not in ("cpu", "cuda"):
        raise ValueError(f"there is no attention for device {layer.device.type}")
    return PackedRows(query_lengths, lengths, block_tables, share_prefixes)


def paged_attention(
    query: Tensor,
    layer: Tensor,
    rows: PackedRows,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention; query [tokens, heads, head_dim], layer [blocks, 2, kv_heads, head_dim * 16].

    `heads` is a multiple of `kv_heads`: query head h reads kv head h // (heads / kv_heads). window: each
    query sees this many keys at most, its own included. softcap: scores become softcap * tanh(score /
    softcap) before the softmax (Gemma 2). Returns [tokens, heads, head_dim] in query's dtype.
    """
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} keys shows a query nothing")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, not {softcap}")
    attend = _in_triton() if takes_triton(layer) else _on_cpu(query.shape[2], query.dtype, layer.dtype)
    return attend(query, layer, rows, scale, window=window, softcap=softcap)


@cache
def _in_triton() -> Callable[..., Tensor]:
    # Here and not above: builds of torch for CPU bring no Triton.
    from pagemill.kernels import attention_triton

    return attention_triton.paged_attention


@cache
def _on_cpu(head_dim: int, *dtypes: torch.dtype) -> Callable[..., Tensor]:
    reason = attention_cpu.refusal(head_dim, *dtypes)
    if reason is None:
        return attention_cpu.paged_attention
    logger.warning("Attention takes the slower form in torch, since for the compiled one %s.", reason)
    return attention_torch.paged_attention
