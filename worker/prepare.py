"""From a row of a job to requests of the engine, and from its completions back to one message.

This is where the two rooms' words meet: parameter names, defaults of the model, limits of the context. It
runs in the engine's process, next to the tokenizer. It may not know leases, storage or Redis.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagemill.engine.chat import TemplateError
from pagemill.engine.request import Completion, Request, SamplingParams, TokenLogprob
from pagemill.jobs.errors import RowFault
from pagemill.jobs.row import Row

DEFAULT_MAX_TOKENS = 1024


class Tokens(Protocol):
    """What of a tokenizer is needed here (engine/tokenizer.py has it)."""

    def encode_prompt(self, text: str) -> list[int]: ...
    def render_chat(
        self, messages: list[dict[str, str]], *, special_tokens_in_content: str = "text"
    ) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model brings: its context in tokens, and its generation_config."""

    context: int
    defaults: Mapping[str, object]


def prepare(
    rid: str,
    row: Row,
    tokens: Tokens,
    limits: Limits,
    *,
    context: int | None = None,
    special: str = "text",
    priority: int = 0,
    group: str = "",
) -> list[Request] | RowFault:
    """The requests of a row, one a sample, or why it can't run. Whatever its text does, nothing is raised.

    context: what the job declared, if less than the model's. group: see the engine's Request. Request ids
    are `rid`, then `rid#1`, ….
    """
    try:
        ids = _token_ids(row, tokens, special)
    except TemplateError as error:
        return RowFault("template_error", _at(row, str(error)), row.line)
    except Exception as error:  # a tokenizer's fault with one text is that row's alone
        kind = type(error).__name__
        return RowFault("engine_error", _at(row, f"the prompt could not be tokenised ({kind})."), row.line)
    cut = row.params.get("truncate_prompt_tokens")
    if cut is not None:
        ids = ids[-cut:]
    most = limits.context if context is None else min(context, limits.context)
    if len(ids) + 1 > most:
        return RowFault(
            "prompt_too_long",
            _at(
                row,
                f"the prompt has {len(ids):,} tokens, and with a context of {most:,} it may have "
                f"{most - 1:,}: shorten it, or set truncate_prompt_tokens.",
            ),
            row.line,
        )
    room = most - len(ids)
    sampling = _sampling(row.params, limits.defaults, room)
    return [
        Request(
            request_id=rid if sample == 0 else f"{rid}#{sample}",
            prompt_token_ids=tuple(ids),
            sampling=SamplingParams(**sampling, sample=sample),
            seed=row.seed,
            priority=priority,
            group=group,
        )
        for sample in range(row.params.get("n", 1))
    ]


def _at(row: Row, message: str) -> str:
    return message[0].upper() + message[1:] if row.line is None else f"line {row.line}: {message}"


def _token_ids(row: Row, tokens: Tokens, special: str) -> list[int]:
    if row.prompt_token_ids is not None:
        return row.prompt_token_ids
    if row.prompt is not None:
        return tokens.encode_prompt(row.prompt)
    assert row.messages is not None, "a row has messages, a prompt or token ids"
    return tokens.render_chat(row.messages, special_tokens_in_content=special)


def _sampling(params: Mapping[str, Any], defaults: Mapping[str, object], room: int) -> dict[str, Any]:
    """Every parameter resolved: the row's, else the model's, else the one that changes nothing.

    room: tokens that the context leaves for the answer; max_tokens is cut to it.
    """
    max_tokens = min(params.get("max_tokens", DEFAULT_MAX_TOKENS), room)
    resolved: dict[str, Any] = {
        "max_tokens": max_tokens,
        # More than what is left could never be kept, and would switch every stop off.
        "min_tokens": min(params.get("min_tokens", 0), max_tokens),
        "stop": tuple(params.get("stop", ())),
        "stop_token_ids": tuple(params.get("stop_token_ids", ())),
        "logit_bias": tuple((int(key), bias) for key, bias in params.get("logit_bias", {}).items()),
    }
    for name, neutral in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0)):
        own = params.get(name)
        resolved[name] = own if own is not None else _number(defaults.get(name), neutral)
    for name in _AS_THEY_ARE:
        if params.get(name) is not None:
            resolved[name] = params[name]
    return resolved


_AS_THEY_ARE = (
    "min_p", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs",
)  # fmt: skip


def _number(value: object, neutral: float) -> float:
    """A value of somebody's generation_config.json, of the kind that it ought to be."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return neutral
    return type(neutral)(value)


def answer(rid: str, completions: Sequence[Completion], tokens: Tokens, arrived: float) -> dict[str, Any]:
    """One message for all samples of a row. arrived: when it came down, in seconds of the engine's clock."""
    if any(completion.finish_reason == "abort" for completion in completions):
        return {"rid": rid, "status": "aborted"}
    first = completions[0]
    message: dict[str, Any] = {
        "rid": rid,
        "status": "completed",
        "prompt_tokens": first.usage.prompt_tokens,
        "completion_tokens": sum(completion.usage.completion_tokens for completion in completions),
        "cached_tokens": first.usage.cached_tokens,
        "queued_ms": _ms(arrived, first.timings.started or first.timings.queued),
        "first_token_ms": _ms(first.timings.queued, first.timings.first_token),
        "total_ms": _ms(first.timings.queued, max(c.timings.finished or 0.0 for c in completions)),
    }
    gaps = [c.inter_token_seconds for c in completions if c.inter_token_seconds is not None]
    message["inter_token_ms"] = _ms(0.0, sum(gaps) / len(gaps)) if gaps else None
    for completion in completions:
        if completion.finish_reason == "error":
            code = completion.error_code or "engine_error"
            return {
                **message,
                "status": "failed",
                "error_code": code,
                "error_message": completion.error_message or code,
            }
    return {
        **message,
        "choices": [_choice(i, completion, tokens) for i, completion in enumerate(completions)],
    }


def failure(rid: str, fault: RowFault) -> dict[str, Any]:
    """The message of a row that never got to the engine."""
    return {"rid": rid, "status": "failed", "error_code": fault.code, "error_message": fault.message}


def _ms(start: float, end: float | None) -> float | None:
    return None if end is None else round((end - start) * 1000, 3)


def _choice(index: int, completion: Completion, tokens: Tokens) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        told = [_logprob(entry, tokens) for entry in completion.logprobs]
        choice["logprobs"] = json.dumps(told, ensure_ascii=False, separators=(",", ":"))
    return choice


def _logprob(entry: TokenLogprob, tokens: Tokens) -> dict[str, Any]:
    return {
        "token": tokens.decode([entry.token_id]),
        "token_id": entry.token_id,
        "logprob": entry.logprob,
        "top_logprobs": [
            {"token": tokens.decode([token_id]), "token_id": token_id, "logprob": logprob}
            for token_id, logprob in entry.top
        ],
    }
