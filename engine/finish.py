"""Why a request is not begun, and when a row ends.

Two pure questions about one row: neither may look at another row, nor change anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagemill.engine.config import ModelInfo, SchedulerConfig
from pagemill.engine.request import FinishReason, Request, SamplingParams
from pagemill.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Refusal:
    code: str
    message: str


def refusal(request: Request, model: ModelInfo, limits: SchedulerConfig) -> Refusal | None:
    """Why this request can never run here, or None. Its row ends with that error; the others go on."""
    problem = _type_problem(request)
    if problem is not None:
        return Refusal("invalid_request", problem)
    length = len(request.prompt_token_ids)
    if length == 0:
        return Refusal("invalid_request", "The prompt is empty: it has no tokens to continue.")
    lowest, highest = min(request.prompt_token_ids), max(request.prompt_token_ids)
    if lowest < 0 or highest >= model.vocab_size:
        return Refusal(
            "invalid_request",
            f"The prompt holds the token id {lowest if lowest < 0 else highest}, and the model's vocabulary "
            f"is 0 to {model.vocab_size - 1}: use the ids of its own tokenizer.",
        )
    if length + 1 > limits.context:
        return Refusal(
            "prompt_too_long",
            f"The prompt has {length} tokens; with a context of {limits.context} it may have at most "
            f"{limits.context - 1}, so that one token of answer fits.",
        )
    if length > limits.kv_tokens:
        return Refusal(
            "prompt_too_long",
            f"The prompt has {length} tokens; the whole key-value memory holds {limits.kv_tokens}.",
        )
    problem = _parameter_problem(request.sampling, model.vocab_size) or _ban_problem(request.sampling, model)
    return Refusal("invalid_request", problem) if problem else None


def _type_problem(request: Request) -> str | None:
    """The first field that is not what its annotation says, in words.

    Nothing checks that on the way here, and what is found later is found in the middle of a step, where it
    would be every row's fault and not this one's.
    """
    if not _are(request.prompt_token_ids, int):
        return "prompt_token_ids must be a tuple of integers."
    for name in ("cache_salt", "group"):
        if not _is_text(getattr(request, name)):
            return f"{name} must be text that can be encoded as UTF-8."
    for name in ("seed", "priority"):
        if type(getattr(request, name)) is not int:
            return f"{name} must be an integer, not {getattr(request, name)!r}."
    params: Any = request.sampling
    if not isinstance(params, SamplingParams):
        return "sampling must be SamplingParams."
    if not _are(params.stop, str):
        return "stop must be a tuple of strings."
    if not _are(params.stop_token_ids, int):
        return "stop_token_ids must be a tuple of integers."
    if not _are(params.logit_bias, tuple) or not all(
        len(pair) == 2 and type(pair[0]) is int and _is_number(pair[1]) for pair in params.logit_bias
    ):
        return "logit_bias must be a tuple of pairs, each of a token id and a number within float32."
    for name in ("max_tokens", "min_tokens", "top_k", "sample", "logprobs"):
        value = getattr(params, name)
        if type(value) is not int and (name != "logprobs" or value is not None):
            return f"{name} must be an integer, not {value!r}."
    for name in ("ignore_eos",):
        if type(value := getattr(params, name)) is not bool:
            return f"{name} must be true or false, not {value!r}."
    for name in _NUMBERS:
        if not _is_number(getattr(params, name)):
            return f"{name} must be a number within float32, not {getattr(params, name)!r}."
    return None


_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_LARGEST_FLOAT32 = 3.4028234e38


def _are(values: object, kind: type) -> bool:
    """Whether it is a tuple of just this type: a bool is no integer here."""
    return type(values) is tuple and set(map(type, values)) <= {kind}


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _is_number(value: object) -> bool:
    """NaN and infinity are none, nor is what a 32-bit tensor would turn into infinity."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -_LARGEST_FLOAT32 <= value <= _LARGEST_FLOAT32
    )


def _parameter_problem(params: SamplingParams, vocab_size: int) -> str | None:
    """The first sampling parameter that is out of its range, in words."""
    at_least = {"max_tokens": 1, "min_tokens": 0, "top_k": 0, "sample": 0}
    for name, least in at_least.items():
        if getattr(params, name) < least:
            return f"{name} must be at least {least}, not {getattr(params, name)}."
    if params.top_k >= 2**31:
        return f"top_k must be less than 2147483648, not {params.top_k}; 0 switches it off."
    for name in ("top_p", "min_p"):
        if not 0 <= getattr(params, name) <= 1:
            return f"{name} must lie between 0 and 1, not {getattr(params, name)}."
    if params.temperature < 0:
        return f"temperature must be 0 or more, not {params.temperature}."
    if params.repetition_penalty <= 0:
        return f"repetition_penalty must be above 0, not {params.repetition_penalty}."
    if params.logprobs is not None and params.logprobs < 0:
        return f"logprobs must be 0 or more, not {params.logprobs}."
    if any(not stop for stop in params.stop):
        return "A stop string is empty."
    for token, _ in params.logit_bias:
        if not 0 <= token < vocab_size:
            return f"logit_bias names token {token}; the vocabulary is 0 to {vocab_size - 1}: leave it out."
    return None


def _ban_problem(params: SamplingParams, model: ModelInfo) -> str | None:
    """Ends are held back until `min_tokens`, which must leave a token to choose."""
    if params.min_tokens == 0 or len(model.eos_token_ids) + len(params.stop_token_ids) < model.vocab_size:
        return None
    left = set(range(model.vocab_size)) - model.eos_token_ids - set(params.stop_token_ids)
    if left:
        return None
    return (
        f"min_tokens {params.min_tokens} forbids every token of the vocabulary until then, as stop_token_ids "
        "and the model's own ends are all of it: name fewer stop_token_ids, or set min_tokens to 0."
    )


@dataclass(frozen=True, slots=True)
class Ending:
    reason: FinishReason
    stop_reason: int | str | None = None


def ending(
    seq: Sequence, eos_token_ids: frozenset[int], most_tokens: int, stop_match: str | None = None
) -> Ending | None:
    """Whether the token just appended ends the row. Stops are honoured from `min_tokens` on.

    most_tokens: tokens a row may reach, prompt and answer. stop_match: the stop string found in its text.
    """
    params = seq.request.sampling
    produced = seq.num_output_tokens
    if produced >= params.min_tokens:
        token = seq.token_ids[-1]
        if token in params.stop_token_ids:
            return Ending("stop", token)
        if token in eos_token_ids and not params.ignore_eos:
            return Ending("stop")
        if stop_match is not None:
            return Ending("stop", stop_match)
    if produced >= params.max_tokens or len(seq.token_ids) >= most_tokens:
        return Ending("length")
    return None


def text_token_ids(seq: Sequence) -> list[int]:
    """The output ids that make the text: all, but for the token that ended it."""
    ids = seq.output_token_ids
    ended_by_token = seq.finish_reason == "stop" and not isinstance(seq.stop_reason, str)
    return ids[:-1] if ended_by_token else ids
