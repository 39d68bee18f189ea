"""Result rows for tests: plain ones, and any that the type allows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from pagemill.jobs.result import ResultRow


def done(row_index: int, text: str = "", **more: Any) -> ResultRow:
    values: dict[str, Any] = {
        "kind": "chat",
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "model": "m",
    } | more
    text = text or f"text {row_index}"
    return ResultRow(row_index, f"row-{row_index}", row_index + 1, "completed", text=text, **values)


def failed(row_index: int, code: str = "prompt_too_long", message: str = "", **more: Any) -> ResultRow:
    message = message or f"line {row_index + 1}: it failed"
    return ResultRow(
        row_index, f"row-{row_index}", row_index + 1, "failed", error_code=code, error_message=message, **more
    )


def rows_of(indexes: Iterable[int], note: str = "") -> list[ResultRow]:
    return [done(i, f"text {i} {note}") for i in indexes]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
counts = st.integers(0, 2**40)
times = st.none() | st.floats(0, 1e9)
choices = st.lists(
    st.fixed_dictionaries(
        {"index": st.integers(0, 127), "text": texts, "finish_reason": st.sampled_from(["stop", "length"])},
        optional={"logprobs": st.just('{"content":[]}')},
    ),
    min_size=1,
    max_size=3,
)
json_texts = st.none() | st.dictionaries(texts, texts, max_size=2).map(json.dumps)


@st.composite
def any_row(draw: st.DrawFn, row_index: int) -> ResultRow:
    common: dict[str, Any] = {
        "row_index": row_index,
        "custom_id": draw(texts),
        "line": draw(st.none() | st.integers(1, 2**60)),
        "kind": draw(st.sampled_from(["chat", "completion"])),
        "prompt_tokens": draw(counts),
        "completion_tokens": draw(counts),
        "cached_tokens": draw(counts),
        "seed": draw(st.none() | st.integers(0, 2**63 - 1)),
        "attempt": draw(st.integers(0, 1000)),
        "queued_ms": draw(times),
        "first_token_ms": draw(times),
        "total_ms": draw(times),
        "model": draw(st.none() | texts),
        "requested_model": draw(st.none() | texts),
        "metadata": draw(json_texts),
        "finished_at": draw(times),
    }
    if draw(st.booleans()):
        code, message = draw(st.sampled_from(["a", "b"])), draw(texts.filter(bool))
        return ResultRow(status="failed", error_code=code, error_message=message, **common)
    return ResultRow(
        status="completed",
        text=draw(texts),
        choices=draw(st.none() | choices),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        logprobs=draw(json_texts),
        **common,
    )


@st.composite
def any_rows(draw: st.DrawFn, max_size: int = 20) -> list[ResultRow]:
    indexes = sorted(draw(st.sets(st.integers(0, 2**62), max_size=max_size)))
    return [draw(any_row(index)) for index in indexes]
