"""Chooses the next token of each row that samples, from what its request asks for.

Turns requests into the tensors of kernels/sample.py. It may not know batches, memory or the model; a row's
token depends on its own logits, tokens, parameters and seed alone.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.engine.request import SamplingParams, TokenLogprob
from pagemill.engine.sequence import Sequence
from pagemill.kernels import sample

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry a row: the token (None where the row's logits are not finite), and its logprob if asked."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprob | None]


class Sampler:
    """eos_token_ids: the model's own ends, which `min_tokens` holds back as it does a request's stop ids.

    put: brings a tensor of the CPU to where logits are.
    """

    def __init__(
        self, eos_token_ids: frozenset[int], put: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self._put = put

    def sample(self, logits: Tensor, sequences: Many[Sequence]) -> Sampled:
        """logits [rows, vocabulary] float32, one row a sequence; they are used up."""
        # A sum is finite only if every term is, and costs one pass.
        finite = logits.sum(-1).isfinite()
        if not bool(finite.all()):
            logits = torch.where(finite[:, None], logits, 0.0)
        raw = (
            logits.clone() if any(map(reshapes, sequences)) and any(map(asks_logprobs, sequences)) else logits
        )
        self.shape(logits, sequences)
        tokens = _choose(logits, sequences)
        logprobs = _logprobs(raw, tokens, sequences)
        ok = finite.tolist()
        chosen = tokens.tolist()
        return Sampled(
            [token if ok[i] else None for i, token in enumerate(chosen)],
            [logprob if ok[i] else None for i, logprob in enumerate(logprobs)],
        )

    def shape(self, logits: Tensor, sequences: Many[Sequence], last: Tensor | None = None) -> None:
        """Penalties, then bias, then the ban on ending early, in place.

        last: int64 [rows] where logits are, each row's last token, which of some rows nobody has read.
        """
        penalised = [(i, seq) for i, seq in enumerate(sequences) if _has_penalty(seq.request.sampling)]
        self._penalise(logits, penalised, last)
        vocabulary = logits.shape[1]
        for i, seq in enumerate(sequences):
            params = seq.request.sampling
            # An id outside the vocabulary cannot be chosen, so neither bias nor ban means anything for it.
            bias = [(token, value) for token, value in params.logit_bias if 0 <= token < vocabulary]
            if bias:
                ids, values = zip(*bias, strict=True)
                numbers = self._put(torch.tensor(values, dtype=torch.float32))
                logits[i].index_add_(0, self._put(torch.tensor(ids)), numbers)
            if _produced(seq) < params.min_tokens:
                ends = self.eos_token_ids.union(params.stop_token_ids)
                banned = [token for token in ends if 0 <= token < vocabulary]
                logits[i].index_fill_(0, self._put(torch.tensor(banned, dtype=torch.int64)), -torch.inf)

    def _penalise(self, logits: Tensor, rows: list[tuple[int, Sequence]], last: Tensor | None) -> None:
        if not rows:
            return
        vocabulary = logits.shape[1]
        where = self._put(torch.tensor([i for i, _ in rows]))
        chosen = logits[where]
        sequences = [seq for _, seq in rows]
        params = [seq.request.sampling for seq in sequences]
        output = self._counts([seq.output_token_ids for seq in sequences], vocabulary)
        unread = [j for j, seq in enumerate(sequences) if seq.num_unread_tokens]
        if unread and last is not None:
            lines = self._put(torch.tensor(unread))
            one = torch.ones(len(unread), device=logits.device)
            output.index_put_((lines, last[where[lines]]), one, accumulate=True)
        numbers = [
            self._put(torch.tensor(column, dtype=torch.float32))
            for column in zip(
                *((p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for p in params),
                strict=True,
            )
        ]
        prompt = self._counts([seq.token_ids[: seq.num_prompt_tokens] for seq in sequences], vocabulary)
        sample.apply_penalties(chosen, prompt, output, *numbers)
        logits[where] = chosen

    def _counts(self, token_ids: list[list[int]], vocabulary: int) -> Tensor:
        rows = torch.repeat_interleave(torch.tensor([len(ids) for ids in token_ids]))
        tokens = torch.tensor([token for ids in token_ids for token in ids], dtype=torch.int64)
        return sample.count_tokens(self._put(rows), self._put(tokens), len(token_ids), vocabulary)


def _has_penalty(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def _produced(seq: Sequence) -> int:
    return seq.num_output_tokens + seq.num_unread_tokens


def reshapes(seq: Sequence) -> bool:
    """Whether something is done to the row's logits before a token is chosen from them."""
    params = seq.request.sampling
    return bool(_has_penalty(params) or params.logit_bias or _produced(seq) < params.min_tokens)


def asks_logprobs(seq: Sequence) -> bool:
    return seq.request.sampling.logprobs is not None


def filters(sequences: Many[Sequence], *, keys: bool) -> dict[str, Array]:
    """What sample.sample_tokens is given of each row, by name. A greedy row has a temperature of 0: filters
    that leave one token are greedy too, and so break ties the same way."""
    params = [seq.request.sampling for seq in sequences]
    found: dict[str, Array] = {
        "temperature": np.array([0.0 if p.greedy else p.temperature for p in params], np.float32),
        "top_k": np.array([p.top_k for p in params], np.int64),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
    }
    if keys:
        found["keys"] = _keys(sequences).numpy()
    return found


def _keys(sequences: Many[Sequence]) -> Tensor:
    return sample.noise_keys(
        [seq.request.seed for seq in sequences],
        [seq.request.sampling.sample for seq in sequences],
        [seq.num_tokens for seq in sequences],
    )


def _choose(logits: Tensor, sequences: Many[Sequence]) -> Tensor:
    drawn = [i for i, seq in enumerate(sequences) if not seq.request.sampling.greedy]
    if len(drawn) == len(sequences):
        return _draw(logits, sequences)
    tokens = sample.best_tokens(logits)
    if drawn:
        where = torch.tensor(drawn)
        tokens[where] = _draw(logits[where], [sequences[i] for i in drawn])
    return tokens


def _draw(logits: Tensor, sequences: Many[Sequence]) -> Tensor:
    params = [seq.request.sampling for seq in sequences]
    return sample.sample_tokens(
        logits,
        torch.tensor([p.temperature for p in params]),
        torch.tensor([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params]),
        torch.tensor([p.min_p for p in params]),
        _keys(sequences),
    )


def wanted_logprobs(sequences: Many[Sequence]) -> dict[int, int]:
    """Which rows ask for log-probabilities, and of how many alternatives."""
    asked = ((i, seq.request.sampling.logprobs) for i, seq in enumerate(sequences))
    return {i: top for i, top in asked if top is not None}


def _logprobs(logits: Tensor, tokens: Tensor, sequences: Many[Sequence]) -> list[TokenLogprob | None]:
    """Of the model's own distribution, before penalties, bias and temperature."""
    wanted = wanted_logprobs(sequences)
    result: list[TokenLogprob | None] = [None] * len(sequences)
    if not wanted:
        return result
    where = torch.tensor(list(wanted))
    chosen = tokens[where]
    found = sample.token_logprobs(logits[where], chosen, max(wanted.values()))
    for i, logprob in zip(wanted, read_logprobs(wanted, chosen.tolist(), *found), strict=True):
        result[i] = logprob
    return result


def read_logprobs(
    wanted: dict[int, int], chosen: list[int], own: Tensor, values: Tensor, ids: Tensor
) -> list[TokenLogprob]:
    """Of each row in `wanted`, from what sample.token_logprobs gives of them."""
    return [
        TokenLogprob(
            token, float(own[j]), tuple(zip(ids[j, :top].tolist(), values[j, :top].tolist(), strict=True))
        )
        for j, (token, top) in enumerate(zip(chosen, wanted.values(), strict=True))
    ]
