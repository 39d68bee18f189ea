"""Random keys and values in scattered blocks, NaN wherever no row has a token, and attention over them.

The layout is that of kernels/cache_write.py, written out once more on purpose: what a kernel is compared with
shares no code with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pagemill.kernels.packed_rows import PackedRows

BLOCK = 16
# Blocks that belong to no row.
SPARE = 5
EIGHT_BITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class Row:
    """Has `length` tokens and computes the last `new`; the first `shared` blocks of its memory are those of
    every other row that shares some."""

    length: int
    new: int = 1
    shared: int = 0


@dataclass(frozen=True)
class Paged:
    """memory: [blocks, layers, 2, kv_heads, head_dim * 16]; scales: of a memory of 8 bits [blocks, layers, 2,
    kv_heads, 16]; tables: block ids of each row."""

    rows: tuple[Row, ...]
    memory: Tensor
    scales: Tensor | None
    tables: tuple[tuple[int, ...], ...]
    head_dim: int

    @cached_property
    def packed(self) -> PackedRows:
        return self.packed_as(share=True)

    def packed_as(self, *, share: bool) -> PackedRows:
        new, lengths = [row.new for row in self.rows], [row.length for row in self.rows]
        return PackedRows(new, lengths, self.tables, share)

    @property
    def tokens(self) -> int:
        return sum(row.new for row in self.rows)

    @property
    def layers(self) -> int:
        return self.memory.shape[1]

    def scales_of(self, layer: int) -> Tensor | None:
        return None if self.scales is None else self.scales[:, layer]

    def dense(self, row: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of one row in float64 [length, kv_heads, head_dim]."""
        blocks = torch.tensor(self.tables[row], device=self.memory.device)
        kept = self.memory[blocks, layer]
        keys = kept[:, 0].unflatten(2, (self.head_dim, BLOCK)).permute(0, 3, 1, 2)
        values = kept[:, 1].unflatten(2, (BLOCK, self.head_dim)).transpose(1, 2)
        keys, values = keys.float().double(), values.float().double()
        if self.scales is not None:
            scales = self.scales[blocks, layer].double()
            keys = keys * scales[:, 0].transpose(1, 2)[..., None]
            values = values * scales[:, 1].transpose(1, 2)[..., None]
        length = self.rows[row].length
        return keys.flatten(0, 1)[:length], values.flatten(0, 1)[:length]

    def bytes_read(self) -> int:
        """By the rows of one layer, each key and value once a row, scales too."""
        tokens = sum(row.length for row in self.rows)
        each = 2 * self.memory.shape[3] * self.head_dim * self.memory.element_size()
        return tokens * (each + (0 if self.scales is None else 2 * self.memory.shape[3] * 4))


def paged(
    rows: Sequence[Row],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    random: torch.Generator,
    layers: int = 2,
) -> Paged:
    device = random.device
    shared = max(row.shared for row in rows)
    own = [-(-row.length // BLOCK) - row.shared for row in rows]
    count = shared + sum(own) + SPARE
    order = torch.randperm(count, generator=random, device=device).tolist()
    head, at, tables = order[:shared], shared, []
    for row, blocks in zip(rows, own, strict=True):
        tables.append(tuple(head[: row.shared] + order[at : at + blocks]))
        at += blocks
    shape = (count, layers, 2, kv_heads, head_dim * BLOCK)
    scales = None
    if dtype in EIGHT_BITS:
        memory = _eight_bits(shape, dtype, random)
        scales = torch.rand((*shape[:4], BLOCK), generator=random, device=device) + 0.5
        scales /= EIGHT_BITS[dtype] / 3
    else:
        memory = torch.randn(shape, generator=random, device=device, dtype=dtype)
    made = Paged(tuple(rows), memory, scales, tuple(tables), head_dim)
    _empty_the_rest(made, order[at:])
    return made


def _eight_bits(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, generator=random, device=random.device, dtype=dtype)
    wide = torch.randn(shape, generator=random, device=random.device, dtype=torch.float16)
    return (wide * 100).clamp(-448, 448).to(dtype)


def _empty_the_rest(made: Paged, spare: list[int]) -> None:
    """Makes what no row has NaN: values, or their scales in 8 bits."""
    eight = made.memory if made.scales is None else made.scales
    device = eight.device
    eight[torch.tensor(spare, device=device)] = torch.nan
    ends = [(table[-1], row.length % BLOCK) for table, row in zip(made.tables, made.rows, strict=True)]
    blocks = torch.tensor([block for block, end in ends if end], device=device, dtype=torch.int64)
    used = torch.tensor([end for _, end in ends if end], device=device)
    behind = torch.arange(BLOCK, device=device) >= used[:, None]
    if made.scales is not None:
        tails = made.scales[blocks].masked_fill(behind[:, None, None, None], torch.nan)
        made.scales[blocks] = tails
        return
    tails = made.memory[blocks]
    keys = tails[:, :, 0].unflatten(-1, (made.head_dim, BLOCK))
    values = tails[:, :, 1].unflatten(-1, (BLOCK, made.head_dim))
    keys.masked_fill_(behind[:, None, None, None], torch.nan)
    values.masked_fill_(behind[:, None, None, :, None], torch.nan)
    made.memory[blocks] = tails


def attention(
    query: Tensor,
    made: Paged,
    scale: float,
    *,
    layer: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    only: Sequence[int] | None = None,
) -> Tensor:
    """In float64, row by row over dense keys. query [tokens, heads, head_dim]; only: of these rows."""
    outs, start = [], 0
    for number, row in enumerate(made.rows):
        mine = query[start : start + row.new].double()
        start += row.new
        if only is not None and number not in only:
            continue
        keys, values = made.dense(number, layer)
        group = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", mine, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        last = torch.arange(row.length - row.new, row.length, device=query.device)[:, None]
        key = torch.arange(row.length, device=query.device)
        hidden = key > last if window is None else (key > last) | (key <= last - window)
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return torch.cat(outs)


def wide_query(
    made: Paged, heads: int, dtype: torch.dtype, random: torch.Generator, spread: float = 1.0
) -> Tensor:
    """Queries [tokens, heads, head_dim] between other numbers, as they lie in a product for queries, keys and
    values together."""
    kv_heads = made.memory.shape[3]
    shape = (made.tokens, heads + 2 * kv_heads, made.head_dim)
    numbers = torch.randn(shape, generator=random, device=random.device) * spread
    return numbers.to(dtype)[:, :heads]
