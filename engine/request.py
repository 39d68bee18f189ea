"""What enters and leaves the engine: frozen requests and frozen completions.

This room knows token ids and numbers. It may not know where a request came from (a file, a job, a
network) nor how it is run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Every value is resolved: nothing here means "ask the model".

    max_tokens: most tokens to produce, >= 1. The engine ends a row earlier, as `length`, when the
        context or the whole memory pool is full.
    temperature: 0 is greedy. top_p in [0, 1] (0 keeps the best token alone), top_k 0 is off,
        min_p in [0, 1] relative to the best token's probability.
    min_tokens: until so many are produced nothing ends the row: ends of sequence are not sampled, and stop
        strings in what is produced until then are passed over.
    stop: strings that end the text, which is cut before the earliest match.
    stop_token_ids: ids that end the text besides the model's own end-of-sequence set.
    ignore_eos: the model's own ends are tokens like any other; `stop` and `stop_token_ids` still count.
    logprobs: None for none, otherwise how many alternatives to report beside the chosen token.
    sample: which of a row's n samples this is; part of the identity of its noise.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    sample: int = 0

    @property
    def greedy(self) -> bool:
        """Whether no noise decides: one token is left to choose from at each position."""
        return self.temperature == 0 or self.top_p == 0 or self.top_k == 1

    @property
    def endless(self) -> bool:
        """Whether a row can't end before its limit, whatever it produces."""
        return self.ignore_eos and not self.stop and not self.stop_token_ids


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued.

    seed: with `sampling.sample` and the position it alone decides the noise (never a shared
        generator), so that a request computed again repeats. Unsigned 64-bit.
    cache_salt: prompts with different salts never share cached blocks.
    priority: higher goes first among the waiting.
    group: rows of one group (a job, say) are expected to be of a kind: answers are taken to be about as long
        as those of the group before. Groups share the engine evenly, and only within one do identical
        requests share a row.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int = 0
    cache_salt: str = ""
    priority: int = 0
    group: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One produced token with its natural-log probability and the best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """cached_tokens: of the prompt, how many the prefix cache gave to the row that ran. A request that was
    answered with the tokens of an identical one has none, so that a sum over requests counts each hit once.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds on the engine's monotonic clock; None for what never happened.

    queued: when the engine took it. started: when its first step began.
    """

    queued: float
    first_token: float | None = None
    finished: float | None = None
    started: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """How a request ended.

    text: decode of all of `token_ids` (special tokens skipped), without the token that ended it, and cut
        before the earliest stop string. token_ids holds everything that was produced.
    finish_reason: `error` carries `error_code` (`invalid_request`, `prompt_too_long`, `numeric_error`,
        `engine_error`) and a message for people; text and token ids are then what was produced before.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] | None = None
    error_code: str | None = None
    error_message: str | None = None
    stop_reason: int | str | None = None  # the stop string or token id that ended it, None for EOS

    @property
    def inter_token_seconds(self) -> float | None:
        """Mean time from a token to the next; None for fewer than two tokens."""
        first, last, gaps = self.timings.first_token, self.timings.finished, len(self.token_ids) - 1
        return None if first is None or last is None or gaps < 1 else (last - first) / gaps


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stream yields: new token ids, and the text that is final by now (never half a character)."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    completion: Completion | None = field(default=None)
