"""Steps of attention over memory in which nothing may be read but what belongs to a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.kernels.attention_torch import paged_attention
from pagemill.kernels.cache_write import keys_of, values_of
from pagemill.kernels.packed_rows import PackedRows, blocks_for


@dataclass(frozen=True)
class Row:
    """Has `length` tokens, computes the last `new`, and has its first `shared` blocks in common with the
    other rows of prompt `prompt`."""

    length: int
    new: int = 1
    prompt: int = 0
    shared: int = 0


@dataclass
class Step:
    query: Tensor
    layer: Tensor
    rows: list[Row]
    tables: list[list[int]]

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    def packed(self, share: bool = True) -> PackedRows:
        return PackedRows(
            [row.new for row in self.rows], [row.length for row in self.rows], self.tables, share
        )

    def starts(self) -> list[int]:
        """The place of each row's first token, and the end."""
        found = [0]
        for row in self.rows:
            found.append(found[-1] + row.new)
        return found

    def only(self, chosen: Sequence[int]) -> Step:
        starts = self.starts()
        tokens = [place for i in chosen for place in range(starts[i], starts[i + 1])]
        return Step(
            self.query[tokens], self.layer, [self.rows[i] for i in chosen], [self.tables[i] for i in chosen]
        )

    def expected(self, window: int | None = None, softcap: float | None = None) -> Tensor:
        """In float32, from the form in torch, which is held to the reference elsewhere."""
        layer = self.layer.nan_to_num(0.0).float()
        return paged_attention(
            self.query.float().contiguous(),
            layer,
            self.packed(share=False),
            self.scale,
            window=window,
            softcap=softcap,
        )


def make_step(
    rows: Sequence[Row],
    *,
    kv_heads: int = 1,
    group: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Step:
    """Over shuffled blocks, one layer of three; NaN wherever no row has a token. Queries lie between other
    numbers, as they do in a product for queries, keys and values together."""
    generator = torch.Generator().manual_seed(seed)
    prompts = {row.prompt: max(r.shared for r in rows if r.prompt == row.prompt) for row in rows}
    own = [blocks_for(row.length) - row.shared for row in rows]
    order = torch.randperm(sum(prompts.values()) + sum(own) + 3, generator=generator).tolist()
    layer = torch.full((len(order), 3, 2, kv_heads, head_dim * 16), torch.nan, dtype=dtype)[:, 1]

    def write(block: int, tokens: int) -> None:
        shape = (kv_heads, head_dim, tokens)
        keys_of(layer, head_dim)[block, :, :, :tokens] = torch.randn(shape, generator=generator).to(dtype)
        values = torch.randn(shape, generator=generator).transpose(1, 2)
        values_of(layer, head_dim)[block, :, :tokens] = values.to(dtype)

    heads = {}
    for prompt, count in prompts.items():
        heads[prompt], order = order[:count], order[count:]
        for block in heads[prompt]:
            write(block, 16)
    tables = []
    for row, count in zip(rows, own, strict=True):
        mine, order = order[:count], order[count:]
        tables.append(heads[row.prompt][: row.shared] + mine)
        for i, block in enumerate(mine, row.shared):
            write(block, min(16, row.length - 16 * i))
    tokens = sum(row.new for row in rows)
    wide = torch.randn((tokens, (group + 2) * kv_heads, head_dim), generator=generator).to(dtype)
    return Step(wide[:, : group * kv_heads], layer, list(rows), tables)
