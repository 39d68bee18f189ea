"""Runs batches on a card: a step is begun, and read when the next has been begun.

    host    inputs of step k+1 ── one copy ──► begin k+1 ── read k, book k ── inputs of step k+2 ...
    card    ........ step k ........................ │ step k+1 ...

A token that step k draws goes from the card's row table into step k+1; the host learns it a step late. A step
in which every row computes the token it drew last, and none asks for more than temperature and filters, is a
graph that was captured before (graphs.py); any other is launched operation by operation. Nothing in either
waits for the card.

It holds weights, key-value memory and the row table. It may not know why a batch is what it is, nor change a
sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill.engine.batch import Batch, ReadResult, StepResult
from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.config import BLOCK_SIZE
from pagemill.engine.errors import StepTooLarge
from pagemill.engine.models.decoder import Decoder, Inputs
from pagemill.engine.request import TokenLogprob
from pagemill.engine.run.card import Card, Fetch
from pagemill.engine.run.graphs import Graphs, StepPlans, plan_name
from pagemill.engine.run.packet import Array, Layout
from pagemill.engine.run.runner import Model
from pagemill.engine.run.sampler import (
    Sampler,
    asks_logprobs,
    filters,
    read_logprobs,
    reshapes,
    wanted_logprobs,
)
from pagemill.engine.run.slots import Slots
from pagemill.engine.sequence import Sequence
from pagemill.kernels import sample
from pagemill.kernels.attention import PackedRows
from pagemill.kernels.row_table import RowTable, advance

# Begun and unread steps, and the one that is being written: words of each must stay as they are.
DEPTH = 1


@dataclass(slots=True)
class Stats:
    """How many steps were graphs, and how many were launched operation by operation."""

    graphs: int = 0
    eager: int = 0


@dataclass(frozen=True, slots=True)
class _Drawing:
    """The rows of a step that draw a token. where: their places in the batch. packed: of their last tokens.
    rows: each with the number of its tokens before the draw."""

    where: list[int]
    packed: list[int]
    sequences: list[Sequence]
    rows: list[tuple[Sequence, int]]


class CardRunner:
    """Implements batch.Runner.

    storage: of one block more than rows are given, which takes what fills a graph up to its size. max_rows:
    rows that run at once. context: most tokens of a row. deterministic: attention computes a token in one way
    whatever runs beside it, and the model's layers are of a kind that does. graphs: whether decode steps are
    captured.
    """

    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        sampler: Sampler,
        card: Card,
        *,
        max_rows: int,
        context: int,
        share_prefixes: bool = True,
        deterministic: bool = False,
        graphs: bool = True,
    ) -> None:
        self.decoder = model
        self.storage = storage
        self.sampler = sampler
        self.card = card
        self.share_prefixes = share_prefixes and not deterministic
        self.deterministic = deterministic
        self.stats = Stats()
        width = -(-context // BLOCK_SIZE)
        self._slots = Slots(max_rows, width)
        self._table = _empty_table(max_rows, width, card.device)
        self._plans = StepPlans(model, storage) if isinstance(model, Decoder) else None
        self._words: list[Tensor] = [card.host_words(1) for _ in range(DEPTH + 1)]
        self._turn = 0
        self.graphs: Graphs | None = None
        if graphs and self._plans is not None:
            with card.active(), torch.inference_mode():
                self.graphs = Graphs(
                    model,
                    storage,
                    card,
                    self._table,
                    self._plans,
                    max_rows=max_rows,
                    context=context,
                    as_runs=deterministic,
                )

    @property
    def depth(self) -> int:
        return DEPTH

    def begin(self, batch: Batch) -> ReadResult:
        started, turn = time.perf_counter(), self._turn
        try:
            with self.card.active(), torch.inference_mode():
                return self._begin(batch, started)
        except torch.OutOfMemoryError as error:
            reason = " ".join(str(error).split())
        # Out here nothing holds the tensors of the step any more. What was sent may be on its way still, and
        # its words are to be written anew.
        with self.card.active():
            self.card.fetch([]).wait()
            self._turn = turn
            self.card.give_back_freed()
        raise StepTooLarge(reason)

    def _begin(self, batch: Batch, started: float) -> ReadResult:
        drawing = _drawing(batch)
        changes = self._slots.changes(drawing.rows)
        replayed = self._replay(batch, drawing, changes)
        if replayed is not None:
            return replayed
        self.stats.eager += 1
        arrays = _inputs(batch, self._slots) | changes | _drawn_inputs(drawing, self._slots)
        rows = PackedRows(
            batch.num_scheduled,
            [start + new for start, new in zip(batch.starts, batch.num_scheduled, strict=True)],
            [seq.block_table for seq in batch.sequences],
            self.share_prefixes,
            self.deterministic,
        )
        plans = self._plans.of(rows) if self._plans is not None else {}
        arrays |= {plan_name(number): words for number, (_, words) in plans.items()}
        layout = Layout.of(arrays)
        device = torch.empty(layout.words, dtype=torch.int32, device=self.card.device)
        self._send(layout, arrays, device)
        if self._plans is not None:
            given = {n: (sizes, layout.read(device, plan_name(n))) for n, (sizes, _) in plans.items()}
            self._plans.give(rows, given)
        prepared = time.perf_counter() - started
        read = partial(layout.read, device)
        self._tell(read, drawing)
        inputs = self._packed(read, rows, any(seq.long_rope for seq in batch.sequences))
        hidden = self.decoder.hidden(inputs, self.storage)
        broken = _broken(hidden, read("ends"))
        return self._draw(hidden, broken, inputs, read, batch, drawing, prepared)

    def _draw(
        self,
        hidden: Tensor,
        broken: Tensor,
        inputs: Inputs,
        read: Callable[[str], Tensor],
        batch: Batch,
        drawing: _Drawing,
        prepared: float,
    ) -> ReadResult:
        results, wanted = [broken], wanted_logprobs(drawing.sequences)
        if drawing.rows:
            packed, slots = read("packed"), read("slots")
            logits = self.decoder.logits(hidden[packed])
            finite = logits.sum(-1).isfinite()
            raw = logits.clone() if wanted and any(map(reshapes, drawing.sequences)) else logits
            self.sampler.shape(logits, drawing.sequences, inputs.token_ids[packed])
            tokens = sample.sample_tokens(
                logits,
                read("temperature"),
                read("top_k"),
                read("top_p"),
                read("min_p"),
                read("keys").view(-1, 2),
            )
            if wanted:
                where = put(self.card, torch.tensor(list(wanted)))
                results += sample.token_logprobs(raw[where], tokens[where], max(wanted.values()))
            # Of a row whose numbers are broken the token is any, and the next step may read no weight beyond.
            tokens.clamp_(0, logits.shape[1] - 1)
            advance(self._table, slots, tokens)
            self._slots.advanced(drawing.rows)
            results.insert(1, torch.where(finite, tokens, -1))
        fetch = self.card.fetch(results)
        return lambda: _eager_result(fetch, batch, drawing.where, wanted, prepared)

    def _replay(self, batch: Batch, drawing: _Drawing, changes: dict[str, Array]) -> ReadResult | None:
        """The step as a graph, or None where it cannot be one."""
        if self.graphs is None or not _plain_decode(batch):
            return None
        started = time.perf_counter()
        arrays = {
            **filters(batch.sequences, keys=False),
            **changes,
            "slots": np.array([self._slots.of(seq) for seq in batch.sequences], np.int64),
        }
        rows = PackedRows(
            batch.num_scheduled,
            batch.lengths,
            [seq.block_table for seq in batch.sequences],
            self.share_prefixes,
            self.deterministic,
        )
        prepared = self.graphs.prepare(rows, arrays)
        if prepared is None:
            return None
        graph, filled = prepared
        self._send(graph.layout, filled, graph.words)
        sizes = {name: array.size for name, array in changes.items()}
        self._tell(lambda name: graph.layout.read(graph.words, name)[: sizes[name]], drawing)
        graph.replay()
        self._slots.advanced(drawing.rows)
        self.stats.graphs += 1
        fetch = self.card.fetch([graph.tokens[: len(batch.sequences)]])
        seconds = time.perf_counter() - started
        return lambda: _decode_result(fetch, seconds)

    def _send(self, layout: Layout, arrays: dict[str, Array], device: Tensor) -> None:
        """The one copy of a step to the card."""
        words = self._words[self._turn]
        if words.shape[0] < layout.words:
            words = self._words[self._turn] = self.card.host_words(2 * layout.words)
        self._turn = (self._turn + 1) % len(self._words)
        for name, values in arrays.items():
            layout.write(words, name, values)
        self.card.send(words[: layout.words], device[: layout.words])

    def _tell(self, read: Callable[[str], Tensor], drawing: _Drawing) -> None:
        """Brings the row table to where the rows that draw are before they do."""
        table, slots = self._table, read("header_slots")
        if slots.numel():
            lengths = read("lengths")
            table.lengths.index_copy_(0, slots, lengths)
            table.computed.index_copy_(0, slots, lengths - 1)
            table.last.index_copy_(0, slots, read("last"))
            table.noise.index_copy_(0, slots, read("noise"))
        places = read("block_places")
        if places.numel():
            table.blocks.view(-1).index_copy_(0, places, read("block_values"))
        self._slots.told(drawing.rows)

    def _packed(self, read: Callable[[str], Tensor], rows: PackedRows, long_rope: bool) -> Inputs:
        token_ids = read("token_ids")
        # Tokens that only the card knows are named by the slots that hold them.
        known = token_ids >= 0
        last = self._table.last[torch.where(known, 0, -1 - token_ids)]
        return Inputs(
            torch.where(known, token_ids, last.long()),
            read("positions"),
            read("blocks"),
            read("offsets"),
            # Attention in Triton reads no place behind a row's end, so that blocks need no clearing.
            token_ids[:0],
            rows,
            read("long_rope").bool() if long_rope else None,
        )


def put(card: Card, tensor: Tensor) -> Tensor:
    """A tensor of the CPU on the card, without waiting for it."""
    return tensor.pin_memory().to(card.device, non_blocking=True) if card.device.type == "cuda" else tensor


def _empty_table(slots: int, width: int, device: torch.device) -> RowTable:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return RowTable(
        zeros(slots), zeros(slots), zeros(slots), zeros(slots, width), zeros(slots, dtype=torch.int64)
    )


def _plain_decode(batch: Batch) -> bool:
    return all(new == 1 for new in batch.num_scheduled) and all(
        batch.samples(i) and not (seq.long_rope or reshapes(seq) or asks_logprobs(seq))
        for i, seq in enumerate(batch.sequences)
    )


def _drawing(batch: Batch) -> _Drawing:
    where = [i for i in range(len(batch.sequences)) if batch.samples(i)]
    ends = list(accumulate(batch.num_scheduled))
    sequences = [batch.sequences[i] for i in where]
    rows = [(batch.sequences[i], batch.lengths[i]) for i in where]
    return _Drawing(where, [ends[i] - 1 for i in where], sequences, rows)


def _inputs(batch: Batch, slots: Slots) -> dict[str, Array]:
    """Of each token: id (-1 - slot for one that nobody has read), position and place; where each row ends."""
    token_ids: list[int] = []
    blocks: list[Array] = []
    positions: list[Array] = []
    long_rope = []
    for seq, begin, new in zip(batch.sequences, batch.starts, batch.num_scheduled, strict=True):
        known = seq.token_ids[begin : begin + new]
        token_ids += known
        token_ids += [-1 - slots.of(seq)] * (new - len(known))
        position = np.arange(begin, begin + new, dtype=np.int64)
        if begin + new > len(seq.block_table) * BLOCK_SIZE:
            raise ValueError(f"row {seq.request.request_id} has too few blocks for {begin + new} tokens")
        first = begin // BLOCK_SIZE
        table = np.array(seq.block_table[first : -(-(begin + new) // BLOCK_SIZE)], np.int64)
        positions.append(position)
        blocks.append(table[position // BLOCK_SIZE - first])
        long_rope += [seq.long_rope] * new
    where = np.concatenate(positions)
    return {
        "token_ids": np.array(token_ids, np.int64),
        "positions": where,
        "blocks": np.concatenate(blocks),
        "offsets": where % BLOCK_SIZE,
        "ends": np.cumsum(np.array(batch.num_scheduled, np.int64)),
        "long_rope": np.array(long_rope, np.int32),
    }


def _drawn_inputs(drawing: _Drawing, slots: Slots) -> dict[str, Array]:
    if not drawing.rows:
        return {}
    return {
        **filters(drawing.sequences, keys=True),
        "packed": np.array(drawing.packed, np.int64),
        "slots": np.array([slots.of(seq) for seq in drawing.sequences], np.int64),
    }


def _broken(hidden: Tensor, ends: Tensor) -> Tensor:
    """Which rows have a NaN or Inf in any of this step's tokens, drawn from or not; bool [rows]."""
    broken = ~hidden.sum(-1, dtype=torch.float32).isfinite()
    upto = F.pad(broken.cumsum(0), (1, 0))[F.pad(ends, (1, 0))]
    return upto[1:] > upto[:-1]


def _eager_result(
    fetch: Fetch, batch: Batch, where: list[int], wanted: dict[int, int], prepared: float
) -> StepResult:
    broken, *drawn = fetch.wait()
    count = len(batch.sequences)
    finite = [not bad for bad in broken.tolist()]
    tokens: list[int | None] = [None] * count
    logprobs: list[TokenLogprob | None] = [None] * count
    chosen = drawn[0].tolist() if where else []
    for i, token in zip(where, chosen, strict=True):
        finite[i] = finite[i] and token >= 0
        tokens[i] = token if finite[i] else None
    if wanted:
        own, values, ids = drawn[1:]
        told = read_logprobs(wanted, [chosen[j] for j in wanted], own, values, ids)
        for j, logprob in zip(wanted, told, strict=True):
            logprobs[where[j]] = logprob if finite[where[j]] else None
    return StepResult(tuple(tokens), tuple(finite), tuple(logprobs), prepared)


def _decode_result(fetch: Fetch, prepared: float) -> StepResult:
    (drawn,) = fetch.wait()
    tokens = drawn.tolist()
    finite = tuple(token >= 0 for token in tokens)
    return StepResult(
        tuple(token if token >= 0 else None for token in tokens), finite, (None,) * len(tokens), prepared
    )
