"""Runs batches: packed inputs, one pass of the decoder, tokens for the rows that sample.

The only thing that holds weights and key-value memory. It may not know why a batch is what it is, nor
change a sequence.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from pagemill.engine.batch import Batch, ReadResult, StepResult
from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.models.decoder import Inputs
from pagemill.engine.models.spec import ModelSpec
from pagemill.engine.request import TokenLogprob
from pagemill.engine.run.rows import StepRows, build_rows
from pagemill.engine.run.sampler import Sampled, Sampler


class Model(Protocol):
    """The one decoder, or a model of transformers in its place."""

    @property
    def spec(self) -> ModelSpec: ...

    def hidden(self, inputs: Inputs, storage: KVStorage) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm; writes the tokens' keys and values."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] in float32 of the hidden states of rows that sample."""
        ...


class ModelRunner:
    """Implements batch.Runner on CPU, for one model and one storage: a step has run when it was begun.

    share_prefixes: whether attention reads memory that rows share once for all of them.
    """

    def __init__(
        self, decoder: Model, storage: KVStorage, sampler: Sampler, share_prefixes: bool = True
    ) -> None:
        self.decoder = decoder
        self.storage = storage
        self.sampler = sampler
        self.share_prefixes = share_prefixes

    @property
    def depth(self) -> int:
        return 0

    def begin(self, batch: Batch) -> ReadResult:
        result = self.execute(batch)
        return lambda: result

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        started = time.perf_counter()
        rows = build_rows(batch, self.storage, self.share_prefixes)
        prepared = time.perf_counter()
        hidden = self.decoder.hidden(rows.inputs, self.storage)
        broken = _broken_rows(hidden, rows)
        logits = self.decoder.logits(hidden[rows.last_tokens]) if rows.sampling else None
        computed = time.perf_counter()
        sampled = self._sample(logits, batch, rows)
        return _result(batch, rows, broken, sampled, prepared - started, time.perf_counter() - computed)

    def _sample(self, logits: Tensor | None, batch: Batch, rows: StepRows) -> Sampled:
        if logits is None:
            return Sampled([], [])
        return self.sampler.sample(logits, [batch.sequences[i] for i in rows.sampling])


def _broken_rows(hidden: Tensor, rows: StepRows) -> frozenset[int]:
    """Sequences with a NaN or Inf in any of this step's tokens, sampled or not.

    A row whose prompt broke in an early chunk must end there: later chunks may look well and be wrong.
    """
    finite = hidden.float().sum(-1).isfinite()
    if bool(finite.all()):
        return frozenset()
    tokens = torch.nonzero(~finite).squeeze(1)
    ends = torch.tensor(rows.starts[1:])
    return frozenset(torch.searchsorted(ends, tokens, right=True).tolist())


def _result(
    batch: Batch,
    rows: StepRows,
    broken: frozenset[int],
    sampled: Sampled,
    prepare_seconds: float,
    sample_seconds: float,
) -> StepResult:
    count = len(batch.sequences)
    tokens: list[int | None] = [None] * count
    logprobs: list[TokenLogprob | None] = [None] * count
    finite = [i not in broken for i in range(count)]
    for i, token, logprob in zip(rows.sampling, sampled.token_ids, sampled.logprobs, strict=True):
        finite[i] = finite[i] and token is not None
        if finite[i]:
            tokens[i], logprobs[i] = token, logprob
    return StepResult(tuple(tokens), tuple(finite), tuple(logprobs), prepare_seconds, sample_seconds)
