"""Sampling parameters: names, ranges, and what is said about the ones that are not ours.

This room knows one JSON object of parameters at a time, a row's or a job's defaults. It may not know
lines, files or jobs; whoever calls puts the line number in front of the message.

Two rules stand behind the tables (promise P8). A parameter is either obeyed or refused by name, never
ignored. And a value is a value: 0, false and [] mean what they say; only null means "not set".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Final, NoReturn

MAX_TOKENS_LIMIT: Final = 2**31 - 1
MAX_TOKEN_ID: Final = 2**31 - 1
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_LOGIT_BIAS: Final = 4096
MAX_LOGPROBS: Final = 20
MAX_SAMPLES: Final = 128
# Below this a temperature divides logits into infinities; the limit it stands for is greedy.
GREEDY_BELOW: Final = 1e-5

Reader = Callable[[str, Any], Any]


class Refusal(Exception):
    """A field that cannot be accepted: a row code and a sentence that names the field and the remedy."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> Refusal:
    return Refusal("invalid_request", message)


def unsupported(message: str) -> Refusal:
    return Refusal("unsupported_parameter", message)


def shown(value: object) -> str:
    """A value as printable JSON, cut short: enough to recognise it, too little to leak a prompt."""
    if isinstance(value, dict) and value:
        return "an object"
    if isinstance(value, list) and value:
        return f"a list of {len(value):,}"
    if isinstance(value, str) and len(value) > 40:
        return _printable(json.dumps(value[:36], ensure_ascii=False))[:-1] + '..."'
    text = json.dumps(value, ensure_ascii=False)
    return _printable(text if len(text) <= 48 else text[:40] + "...")


def _printable(text: str) -> str:
    """JSON escapes control characters of ASCII alone; others turn a line around, or are not to be seen."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _wrong(name: str, wanted: str, value: object) -> NoReturn:
    raise invalid(f"`{name}` must be {wanted}, not {shown(value)}")


def integer(low: int, high: int) -> Reader:
    """Whole numbers from low to high; 16.0 is one (JSON has one kind of number), true is not."""
    wanted = (
        f"a whole number, {low} or more"
        if high >= MAX_TOKENS_LIMIT
        else f"a whole number from {low} to {high}"
    )

    def read(name: str, value: Any) -> int:
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is int and value > high:  # beyond what nobody means, which `wanted` may leave unsaid
            _wrong(name, f"{high} or less", value)
        if type(value) is not int or value < low:
            _wrong(name, wanted, value)
        return int(value)

    return read


def number(low: float, high: float) -> Reader:
    """Numbers from low to high, both included."""
    wanted = f"a number from {low:g} to {high:g}"

    def read(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            _wrong(name, wanted, value)
        return float(value)

    return read


def _boolean(name: str, value: Any) -> bool:
    if type(value) is not bool:
        _wrong(name, "true or false", value)
    return bool(value)


def _temperature(name: str, value: Any) -> float:
    read: float = _temperature_range(name, value)
    return 0.0 if read < GREEDY_BELOW else read


def _repetition_penalty(name: str, value: Any) -> float:
    read: float = _repetition_range(name, value)
    if read < 0.01:
        _wrong(name, "a number from 0.01 to 100 (1 changes nothing)", value)
    return read


_temperature_range = number(0, 2)
_repetition_range = number(0, 100)
_top_k_range = integer(-1, MAX_TOKEN_ID)
_bias_range = number(-100, 100)


def _top_k(name: str, value: Any) -> int:
    # vLLM writes -1 for "all tokens", others 0; both are in files made for other services.
    return max(0, int(_top_k_range(name, value)))


def _stop(name: str, value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        _wrong(name, f"a string or a list of up to {MAX_STOPS} strings", value)
    if len(stops) > MAX_STOPS:
        raise invalid(f"`{name}` holds {len(stops)} strings; {MAX_STOPS} are the most")
    if not all(stops):
        raise invalid(f"`{name}` holds an empty string, which would stop at once: leave it out")
    if max(map(len, stops), default=0) > MAX_STOP_CHARACTERS:
        raise invalid(f"`{name}` holds a string of more than {MAX_STOP_CHARACTERS} characters: shorten it")
    return list(dict.fromkeys(stops))


def token_ids(name: str, value: Any, most: int) -> list[int]:
    """A list of token ids; an empty one is the caller's business."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        _wrong(name, "a list of token ids (whole numbers)", value)
    if len(value) > most:
        raise invalid(f"`{name}` holds {len(value):,} token ids; {most:,} are the most")
    if value and not (min(value) >= 0 and max(value) <= MAX_TOKEN_ID):
        raise invalid(f"`{name}` holds a number that is no token id: 0 to {MAX_TOKEN_ID} are")
    return list(value)


def _stop_token_ids(name: str, value: Any) -> list[int]:
    return token_ids(name, value, MAX_STOP_TOKEN_IDS)


def _logit_bias(name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        _wrong(name, 'an object such as {"50256": -100}', value)
    if len(value) > MAX_LOGIT_BIAS:
        raise invalid(f"`{name}` has {len(value):,} entries; {MAX_LOGIT_BIAS:,} are the most")
    bias: dict[str, float] = {}
    for key, amount in value.items():
        # ASCII digits without leading zeros: "7" and "07" would be one token with two biases.
        if not (key.isascii() and key.isdigit()) or (key[0] == "0" and key != "0") or len(key) > 10:
            raise invalid(f'`{name}` has the key {shown(key)}; keys are token ids such as "50256"')
        if int(key) > MAX_TOKEN_ID:
            raise invalid(f"`{name}` has the key {shown(key)}, which is no token id")
        bias[key] = _bias_range(f"{name}.{key}", amount)
    return bias


def _logprobs(name: str, value: Any) -> bool | int:
    if type(value) is bool:
        return value
    return int(_logprobs_range(name, value))


_logprobs_range = integer(0, MAX_LOGPROBS)

READERS: Final[dict[str, Reader]] = {
    "max_tokens": integer(1, MAX_TOKENS_LIMIT),
    "max_completion_tokens": integer(1, MAX_TOKENS_LIMIT),
    "min_tokens": integer(0, MAX_TOKENS_LIMIT),
    "temperature": _temperature,
    "top_p": number(0, 1),
    "top_k": _top_k,
    "min_p": number(0, 1),
    "n": integer(1, MAX_SAMPLES),
    "seed": integer(0, 2**63 - 1),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": _boolean,
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": _repetition_penalty,
    "logit_bias": _logit_bias,
    "logprobs": _logprobs,
    "top_logprobs": _logprobs_range,
    "truncate_prompt_tokens": integer(1, MAX_TOKENS_LIMIT),
}


def _any_text(value: object) -> bool:
    return isinstance(value, str)


def _is(*nothings: object) -> Callable[[object], bool]:
    # By type as well: `1 == True` and `0 == False` would let the wrong ones in.
    return lambda value: any(type(value) is type(nothing) and value == nothing for nothing in nothings)


# Parameters of other services whose given values change nothing about the completion. Any other value
# of theirs is refused by name.
NOTHING: Final[dict[str, Callable[[object], bool]]] = {
    "stream": _is(False),
    "stream_options": _is(),
    "store": lambda value: type(value) is bool,
    "user": _any_text,
    "safety_identifier": _any_text,
    "prompt_cache_key": _any_text,
    "service_tier": _any_text,
    "response_format": _is({"type": "text"}),
    "tools": _is([]),
    "tool_choice": _is("none"),
    "functions": _is([]),
    "function_call": _is("none"),
    "parallel_tool_calls": _is(),
    "modalities": _is(["text"]),
    "audio": _is(),
    "prediction": _is(),
    "reasoning_effort": _is(),
    "verbosity": _is(),
    "web_search_options": _is(),
    "best_of": _is(1),
    "echo": _is(False),
    "suffix": _is(""),
    "use_beam_search": _is(False),
    "length_penalty": _is(1, 1.0),
    "skip_special_tokens": _is(True),
    "include_stop_str_in_output": _is(False),
    "add_generation_prompt": _is(True),
    "continue_final_message": _is(False),
    "prompt_logprobs": _is(),
    "guided_json": _is(),
    "guided_regex": _is(),
    "guided_choice": _is(),
    "guided_grammar": _is(),
}

_BESIDE: Final = ("prompt", "messages", "metadata", "model", "custom_id")
"""What stands beside parameters in a line; for guessing what a misspelt name meant."""

_REMEDIES: Final[dict[str, str]] = {
    "stream": "a batch has nobody to stream to: leave it out or say false",
    "response_format": 'only {"type": "text"} is supported: ask for a format in the prompt',
    "best_of": "ask for `n` samples and choose among them",
    "echo": "the prompt is in your input: leave it out or say false",
}


def read_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Check parameters and give them their canonical names.

    Returns only what was set: max_tokens, min_tokens, temperature, top_p, top_k (0 is off), min_p, n,
    seed, stop (list), stop_token_ids, ignore_eos, presence_penalty, frequency_penalty,
    repetition_penalty, logit_bias ({"<token id>": float}), logprobs (how many alternatives, or None for
    none), truncate_prompt_tokens. Raises Refusal.
    """
    out: dict[str, Any] = {}
    for name, value in raw.items():
        reader = READERS.get(name)
        if reader is None:
            _check_nothing(name, value)
        elif value is not None:
            out[name] = reader(name, value)
    if "max_completion_tokens" in out:
        _join_max_tokens(out)
    if "logprobs" in out or "top_logprobs" in out:
        _join_logprobs(out)
    check_together(out)
    return out


def check_together(params: Mapping[str, Any]) -> None:
    """What only shows once a row's values stand over the job's defaults."""
    least, most = params.get("min_tokens", 0), params.get("max_tokens")
    if most is not None and least > most:
        raise invalid(
            f"`min_tokens` {least:,} is more than `max_tokens` {most:,}: lower it or raise the other"
        )


def _join_max_tokens(out: dict[str, Any]) -> None:
    newer = out.pop("max_completion_tokens")
    if out.setdefault("max_tokens", newer) != newer:
        raise invalid(
            f"`max_tokens` {out['max_tokens']} and `max_completion_tokens` {newer} differ: give one of them"
        )


def _join_logprobs(out: dict[str, Any]) -> None:
    """Chat says true and a number beside it, completions say the number: one number in the end."""
    switch, top = out.pop("logprobs", None), out.pop("top_logprobs", None)
    if type(switch) is int:
        if top not in (None, switch):
            raise invalid(f"`logprobs` {switch} and `top_logprobs` {top} differ: give one of them")
        out["logprobs"] = switch
    elif switch is True:
        out["logprobs"] = top or 0
    elif top:
        raise invalid("`top_logprobs` needs `logprobs`: true beside it")
    else:
        out["logprobs"] = None


def _check_nothing(name: str, value: object) -> None:
    """Let through what means nothing; refuse the rest by name."""
    means_nothing = NOTHING.get(name)
    if means_nothing is None:
        raise unsupported(f"`{name}` is not a parameter pagemill knows: {_hint(name)}")
    if value is None or means_nothing(value):
        return
    remedy = _REMEDIES.get(name, "leave it out")
    raise unsupported(f"`{name}`: {shown(value)} is not supported: {remedy}")


@lru_cache(maxsize=1024)
def _hint(name: str) -> str:
    close = get_close_matches(name[:64], [*READERS, *_BESIDE], n=1, cutoff=0.75)
    if close:
        return f"did you mean `{close[0]}`?"
    return "leave it out, or put data of your own under `metadata`"
