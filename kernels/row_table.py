"""Rows that stay on the device: what a decode step reads is derived from them, and the drawn tokens go back.

A line a slot, changed from outside only where rows come, go or get a block. So a step needs nothing from
the host but which slots take part, and the next one can be started before its tokens are known there.
It knows slots, blocks and tokens; not requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.kernels.cache_write import BLOCK_SIZE
from pagemill.kernels.choice import takes_triton
from pagemill.kernels.sample import mix64


@dataclass(frozen=True, slots=True)
class RowTable:
    """lengths: int32 [slots], tokens of the row that are known. computed: int32 [slots], those whose keys and
    values are in memory; in a decode step one less than lengths. last: int32 [slots], the last known token.
    blocks: int32 [slots, most], the row's block table. noise: int64 [slots], sample.noise_base as signed."""

    lengths: Tensor
    computed: Tensor
    last: Tensor
    blocks: Tensor
    noise: Tensor


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Of each row [rows]: token_ids, positions, and the blocks and offsets that keys and values go to, int64.

    lengths: int32, how many keys attention reads. keys: int32 [rows, 2], the noise of the token to be drawn.
    """

    token_ids: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    lengths: Tensor
    keys: Tensor

    @staticmethod
    def empty(rows: int, device: torch.device) -> DecodeInputs:
        """To be written by `decode_inputs`: a CUDA graph reads the same addresses at each replay."""
        tokens, positions, blocks, offsets = (
            torch.empty(rows, dtype=torch.int64, device=device) for _ in range(4)
        )
        lengths = torch.empty(rows, dtype=torch.int32, device=device)
        keys = torch.empty((rows, 2), dtype=torch.int32, device=device)
        return DecodeInputs(tokens, positions, blocks, offsets, lengths, keys)


def decode_inputs(table: RowTable, slots: Tensor, spare: int, out: DecodeInputs) -> None:
    """Fills `out` for the next token of the rows in `slots`, int64 [rows].

    A slot of -1 fills a graph up to its size: token 0 at position 0, written into the block `spare`, which
    belongs to no row; what is drawn for it is to be thrown away.
    """
    if takes_triton(slots):
        from pagemill.kernels import row_table_triton

        row_table_triton.decode_inputs(table, slots, spare, out)
    else:
        decode_inputs_torch(table, slots, spare, out)


def decode_inputs_torch(table: RowTable, slots: Tensor, spare: int, out: DecodeInputs) -> None:
    """The plain form."""
    there, lines = slots >= 0, slots.clamp(min=0)
    positions = torch.where(there, table.computed[lines], 0).long()
    out.positions.copy_(positions)
    out.token_ids.copy_(torch.where(there, table.last[lines], 0))
    out.blocks.copy_(torch.where(there, table.blocks[lines, positions // BLOCK_SIZE], spare))
    out.offsets.copy_(positions % BLOCK_SIZE)
    out.lengths.copy_(positions + 1)
    # The token to be drawn stands behind all known ones.
    words = [
        _mixed(noise ^ length)
        for noise, length in zip(table.noise[lines].tolist(), table.lengths[lines].tolist(), strict=True)
    ]
    out.keys.copy_(torch.tensor(words, dtype=torch.int64).view(torch.int32).view(-1, 2))


def _mixed(x: int) -> int:
    """sample.py's last step from a row's noise and a position to its key, as a signed integer."""
    mixed = mix64(x & ((1 << 64) - 1))
    return mixed - (1 << 64) if mixed >> 63 else mixed


def advance(table: RowTable, slots: Tensor, tokens: Tensor) -> None:
    """Puts the token drawn in each row, int64 [rows], behind it; slots of -1 are none, others come once."""
    if takes_triton(slots):
        from pagemill.kernels import row_table_triton

        row_table_triton.advance(table, slots, tokens)
    else:
        advance_torch(table, slots, tokens)


def advance_torch(table: RowTable, slots: Tensor, tokens: Tensor) -> None:
    """The plain form."""
    there = slots >= 0
    lines = slots[there]
    table.last[lines] = tokens[there].to(torch.int32)
    table.computed[lines] += 1
    table.lengths[lines] += 1
