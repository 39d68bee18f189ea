"""Launches row tables in Triton, for row_table.py; not to be imported where triton may be missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from torch import Tensor

from pagemill.kernels.row_table_triton_kernel import advance_kernel, decode_inputs_kernel
from pagemill.kernels.variants import FP_FUSION, Variant

if TYPE_CHECKING:
    from pagemill.kernels.row_table import DecodeInputs, RowTable

BLOCK, NUM_WARPS = 128, 4


def decode_inputs(table: RowTable, slots: Tensor, spare: int, out: DecodeInputs) -> None:
    """row_table.decode_inputs, one launch."""
    rows = slots.shape[0]
    if not rows:
        return
    decode_inputs_kernel[(triton.cdiv(rows, BLOCK),)](
        table.lengths,
        table.computed,
        table.last,
        table.blocks,
        table.noise,
        slots,
        out.token_ids,
        out.positions,
        out.blocks,
        out.offsets,
        out.lengths,
        out.keys,
        rows,
        table.blocks.stride(0),
        spare,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=FP_FUSION,
    )


def advance(table: RowTable, slots: Tensor, tokens: Tensor) -> None:
    """row_table.advance, one launch."""
    rows = slots.shape[0]
    if not rows:
        return
    advance_kernel[(triton.cdiv(rows, BLOCK),)](
        table.lengths,
        table.computed,
        table.last,
        slots,
        tokens,
        rows,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=FP_FUSION,
    )


def variants() -> list[Variant]:
    """One each: nothing in them depends on a model."""
    lines = dict.fromkeys(["lengths", "computed", "last"], "*i32:16")
    inputs = {**lines, "blocks": "*i32:16", "noise": "*i64:16", "slots": "*i64:16"}
    inputs |= dict.fromkeys(["token_ids", "positions", "places", "offsets"], "*i64:16")
    inputs |= {"read": "*i32:16", "keys": "*i32:16", "rows": "i32", "table_width": "i32", "spare": "i32"}
    after = {**lines, "slots": "*i64:16", "tokens": "*i64:16", "rows": "i32"}
    return [
        Variant(decode_inputs_kernel, "any", inputs, {"BLOCK": BLOCK}, NUM_WARPS, 1),
        Variant(advance_kernel, "any", after, {"BLOCK": BLOCK}, NUM_WARPS, 1),
    ]
