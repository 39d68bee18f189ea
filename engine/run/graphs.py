"""Decode steps that were captured once for each of some sizes: a replay is one launch, whatever the model.

Captured is everything from the row table back to it: the inputs of each row's next token, the pass, logits,
drawing, and putting the token behind the row. A step of fewer rows than its graph is filled up with slots of
-1. Grids are fixed by how much attention a size may hold; a step that needs more is launched operation by
operation, and has then so much work that launches cost little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.models.decoder import Decoder, Inputs
from pagemill.engine.run.card import Card, Graph
from pagemill.engine.run.packet import Array, Layout
from pagemill.engine.run.runner import Model
from pagemill.engine.run.slots import BLOCKS, HEADER
from pagemill.kernels import sample
from pagemill.kernels.attention import PackedRows
from pagemill.kernels.row_table import DecodeInputs, RowTable, advance, decode_inputs

if TYPE_CHECKING:
    from pagemill.kernels.attention_triton_plan import Sizes

# Splits of 256 keys that a graph holds: so many a row on average, and for few rows so many in all. Each is a
# program of every layer's grid, used or not.
SPLITS_A_ROW, LEAST_SPLITS = 4, 128
FILTERS = (("temperature", np.float32), ("top_k", np.int64), ("top_p", np.float32), ("min_p", np.float32))


def sizes_up_to(rows: int) -> list[int]:
    """Numbers of rows that are captured, largest first: closer together where a row more costs more."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max(rows, 256) + 1, 64)]
    return sorted({*(size for size in steps if size < rows), rows}, reverse=True)


class DoesNotFit(Exception):
    """A step is more than a graph holds."""


class StepPlans:
    """What attention in Triton is to do in a step: one plan for each window that layers of the model have."""

    def __init__(self, model: Decoder, storage: KVStorage) -> None:
        spec = model.spec
        self.windows = list(dict.fromkeys(spec.window(i) for i in range(spec.num_layers)))
        # Here and not above: builds of torch for CPU bring no Triton.
        from pagemill.kernels.attention_triton import Kind, has_wgmma

        sizes = model.dtype.itemsize, storage.tensor.element_size()
        kind = Kind(spec.head_dim, *sizes, has_wgmma(storage.tensor.device))
        self._shape = (spec.num_heads // spec.num_kv_heads, kind)

    def of(self, rows: PackedRows, most: Sizes | None = None) -> dict[int, tuple[Sizes, Array]]:
        """By number of the window: sizes, and the words that go to the card. most: what a graph holds; raises
        DoesNotFit where the step is more."""
        from pagemill.kernels.attention_triton import plan_rows, plan_to_words

        found: dict[int, tuple[Sizes, Array]] = {}
        for number, window in enumerate(self.windows):
            plan = plan_rows(rows, *self._shape, window)
            sizes = most or plan.sizes
            if not sizes.hold(plan.sizes):
                raise DoesNotFit
            found[number] = sizes, plan_to_words(plan, sizes)
        return found

    def give(self, rows: PackedRows, plans: Mapping[int, tuple[Sizes, Tensor]]) -> None:
        """Has the layers find them, instead of each making its own."""
        from pagemill.kernels.attention_triton import DevicePlan, plan_key

        for number, (sizes, words) in plans.items():
            rows.once(plan_key(*self._shape, self.windows[number]), partial(DevicePlan, sizes, words))


@dataclass(frozen=True, slots=True)
class _Static:
    """What every graph works on. spare: the block that what fills a graph up writes into."""

    model: Model
    storage: KVStorage
    table: RowTable
    plans: StepPlans
    spare: int


class DecodeGraph:
    """One size. words: int32 on the card, at an address that stays, laid out as `layout` says. tokens: int64
    [size], what the last replay drew, -1 where a row's numbers are broken."""

    def __init__(self, static: _Static, card: Card, size: int, held: Sizes, pool: object) -> None:
        from pagemill.kernels.attention_triton import plan_words

        self.size, self.held = size, held
        plans = [(plan_name(n), np.int32, plan_words(held)) for n in range(len(static.plans.windows))]
        changes = [(name, kind, size) for name, kind in HEADER.items()]
        # A decode takes a block at most, and rows come with what they had when they drew their first token.
        changes += [(name, kind, 2 * size) for name, kind in BLOCKS.items()]
        self.layout = Layout(
            [("slots", np.int64, size), *((n, k, size) for n, k in FILTERS), *plans, *changes]
        )
        self.words = torch.zeros(self.layout.words, dtype=torch.int32, device=card.device)
        self.tokens = torch.empty(size, dtype=torch.int64, device=card.device)
        self._static = static
        self._inputs = DecodeInputs.empty(size, card.device)
        self._rows = PackedRows((), (), ())
        given = {
            n: (held, self.layout.read(self.words, plan_name(n))) for n in range(len(static.plans.windows))
        }
        static.plans.give(self._rows, given)
        # Nobody's rows: what is done while it is captured touches the spare block alone.
        self.layout.read(self.words, "slots").fill_(-1)
        self._graph: Graph = card.capture(self._step, pool)

    def replay(self) -> None:
        self._graph.replay()

    def _step(self) -> None:
        static, inputs = self._static, self._inputs
        slots = self.layout.read(self.words, "slots")
        decode_inputs(static.table, slots, static.spare, inputs)
        packed = Inputs(
            inputs.token_ids,
            inputs.positions,
            inputs.blocks,
            inputs.offsets,
            inputs.token_ids[:0],  # attention in Triton reads no place behind a row's end
            self._rows,
        )
        hidden = static.model.hidden(packed, static.storage)
        logits = static.model.logits(hidden)
        temperature, top_k, top_p, min_p = (self.layout.read(self.words, name) for name, _ in FILTERS)
        tokens = sample.sample_tokens(logits, temperature, top_k, top_p, min_p, inputs.keys)
        finite = hidden.sum(-1, dtype=torch.float32).isfinite() & logits.sum(-1).isfinite()
        tokens.clamp_(0, logits.shape[1] - 1)
        advance(static.table, slots, tokens)
        self.tokens.copy_(torch.where(finite, tokens, -1))


class Graphs:
    """All sizes up to max_rows."""

    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        card: Card,
        table: RowTable,
        plans: StepPlans,
        *,
        max_rows: int,
        context: int,
        as_runs: bool = False,
    ) -> None:
        """as_runs: see PackedRows."""
        static = _Static(model, storage, table, plans, storage.num_blocks - 1)
        self._plans = plans
        pool = card.graph_pool()
        self._by_size = {
            size: DecodeGraph(static, card, size, held_by(size, context, as_runs), pool)
            for size in sizes_up_to(max_rows)
        }

    def prepare(
        self, rows: PackedRows, arrays: Mapping[str, Array]
    ) -> tuple[DecodeGraph, dict[str, Array]] | None:
        """The smallest graph that these rows fit, and what it is to be sent; None where they fit none."""
        count = len(rows.lengths)
        size = min((size for size in self._by_size if size >= count), default=None)
        if size is None:
            return None
        graph = self._by_size[size]
        if arrays["block_places"].size > 2 * size:
            return None
        try:
            plans = self._plans.of(rows, graph.held)
        except DoesNotFit:
            return None
        filled: dict[str, Array] = dict(arrays)
        for name, value in (("slots", -1), *((name, 0) for name, _ in FILTERS)):
            filled[name] = np.concatenate([arrays[name], np.full(size - count, value, arrays[name].dtype)])
        return graph, filled | {plan_name(number): words for number, (_, words) in plans.items()}


def plan_name(number: int) -> str:
    return f"plan {number}"


def held_by(size: int, context: int, as_runs: bool = False) -> Sizes:
    from pagemill.kernels.attention_triton_plan import SPLIT, SPLIT_BLOCKS, Sizes

    splits = min(max(SPLITS_A_ROW * size, LEAST_SPLITS), size * -(-context // SPLIT))
    if as_runs:
        return Sizes(0, 0, 0, size, 0, splits * SPLIT_BLOCKS)
    return Sizes(splits, splits // 4, size, 0, splits, splits * SPLIT_BLOCKS)
