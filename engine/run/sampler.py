"""Chooses the next token of each row that samples, from what its request asks for.

Turns requests into the tensors of kernels/sample.py. It may not know batches, memory or the model; a row's
token depends on its own logits, tokens, parameters and seed alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.engine.request import SamplingParams, TokenLogprob
from pagemill.engine.sequence import Sequence
from pagemill.kernels import sample


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry a row: the token (None where the row's logits are not finite), and its logprob if asked."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprob | None]


class Sampler:
    """eos_token_ids: the model's own ends, which `min_tokens` holds back as it does a request's stop ids."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids

    def sample(self, logits: Tensor, sequences: Many[Sequence]) -> Sampled:
        """logits [rows, vocabulary] float32, one row a sequence; they are used up."""
        # A sum is finite only if every term is, and costs one pass.
        finite = logits.sum(-1).isfinite()
        if not bool(finite.all()):
            logits = torch.where(finite[:, None], logits, 0.0)
        raw = logits.clone() if self._reshapes(sequences) and _asks_logprobs(sequences) else logits
        self._shape(logits, sequences)
        tokens = _choose(logits, sequences)
        logprobs = _logprobs(raw, tokens, sequences)
        ok = finite.tolist()
        chosen = tokens.tolist()
        return Sampled(
            [token if ok[i] else None for i, token in enumerate(chosen)],
            [logprob if ok[i] else None for i, logprob in enumerate(logprobs)],
        )

    def _reshapes(self, sequences: Many[Sequence]) -> bool:
        return any(
            _has_penalty(seq.request.sampling)
            or seq.request.sampling.logit_bias
            or seq.num_output_tokens < seq.request.sampling.min_tokens
            for seq in sequences
        )

    def _shape(self, logits: Tensor, sequences: Many[Sequence]) -> None:
        """Penalties, then bias, then the ban on ending early, in place."""
        _penalise(logits, [(i, seq) for i, seq in enumerate(sequences) if _has_penalty(seq.request.sampling)])
        vocabulary = logits.shape[1]
        for i, seq in enumerate(sequences):
            params = seq.request.sampling
            # An id outside the vocabulary cannot be chosen, so neither bias nor ban means anything for it.
            bias = [(token, value) for token, value in params.logit_bias if 0 <= token < vocabulary]
            if bias:
                ids, values = zip(*bias, strict=True)
                logits[i].index_add_(0, torch.tensor(ids), torch.tensor(values, dtype=torch.float32))
            if seq.num_output_tokens < params.min_tokens:
                ends = self.eos_token_ids.union(params.stop_token_ids)
                banned = [token for token in ends if 0 <= token < vocabulary]
                logits[i, torch.tensor(banned, dtype=torch.int64)] = -torch.inf


def _has_penalty(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def _asks_logprobs(sequences: Many[Sequence]) -> bool:
    return any(seq.request.sampling.logprobs is not None for seq in sequences)


def _penalise(logits: Tensor, rows: list[tuple[int, Sequence]]) -> None:
    if not rows:
        return
    where = torch.tensor([i for i, _ in rows])
    chosen = logits[where]
    sequences = [seq for _, seq in rows]
    params = [seq.request.sampling for seq in sequences]
    sample.apply_penalties(
        chosen,
        _counts([seq.token_ids[: seq.num_prompt_tokens] for seq in sequences], logits.shape[1]),
        _counts([seq.output_token_ids for seq in sequences], logits.shape[1]),
        torch.tensor([p.presence_penalty for p in params]),
        torch.tensor([p.frequency_penalty for p in params]),
        torch.tensor([p.repetition_penalty for p in params]),
    )
    logits[where] = chosen


def _counts(token_ids: list[list[int]], vocabulary: int) -> Tensor:
    rows = torch.repeat_interleave(torch.tensor([len(ids) for ids in token_ids]))
    tokens = torch.tensor([token for ids in token_ids for token in ids], dtype=torch.int64)
    return sample.count_tokens(rows, tokens, len(token_ids), vocabulary)


def _is_greedy(params: SamplingParams) -> bool:
    # Filters that leave one token are greedy too, and so break ties the same way.
    return params.temperature == 0 or params.top_p == 0 or params.top_k == 1


def _choose(logits: Tensor, sequences: Many[Sequence]) -> Tensor:
    drawn = [i for i, seq in enumerate(sequences) if not _is_greedy(seq.request.sampling)]
    if len(drawn) == len(sequences):
        return _draw(logits, sequences)
    tokens = sample.best_tokens(logits)
    if drawn:
        where = torch.tensor(drawn)
        tokens[where] = _draw(logits[where], [sequences[i] for i in drawn])
    return tokens


def _draw(logits: Tensor, sequences: Many[Sequence]) -> Tensor:
    params = [seq.request.sampling for seq in sequences]
    keys = sample.noise_keys(
        [seq.request.seed for seq in sequences],
        [p.sample for p in params],
        [len(seq.token_ids) for seq in sequences],
    )
    return sample.sample_tokens(
        logits,
        torch.tensor([p.temperature for p in params]),
        torch.tensor([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params]),
        torch.tensor([p.min_p for p in params]),
        keys,
    )


def _logprobs(logits: Tensor, tokens: Tensor, sequences: Many[Sequence]) -> list[TokenLogprob | None]:
    """Of the model's own distribution, before penalties, bias and temperature."""
    wanted = {
        i: seq.request.sampling.logprobs
        for i, seq in enumerate(sequences)
        if seq.request.sampling.logprobs is not None
    }
    result: list[TokenLogprob | None] = [None] * len(sequences)
    if not wanted:
        return result
    where = torch.tensor(list(wanted))
    chosen = tokens[where]
    own, values, ids = sample.token_logprobs(logits[where], chosen, max(wanted.values()))
    for j, (i, top) in enumerate(wanted.items()):
        pairs = zip(ids[j, :top].tolist(), values[j, :top].tolist(), strict=True)
        result[i] = TokenLogprob(int(chosen[j]), float(own[j]), tuple(pairs))
    return result
