"""A completion becomes an output row, whatever it holds."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.jobs.row import Row
from pagemill.worker.shard import result_row


def row(line: int | None) -> Row:
    return Row(
        row_index=0, line=line, custom_id="row-0", kind="completion", messages=None, prompt="p",
        prompt_token_ids=None, params={}, seed=1,
    )  # fmt: skip


def failed(message: str) -> dict[str, Any]:
    return {"status": "failed", "error_code": "numeric_error", "error_message": message}


@pytest.mark.parametrize(
    ("line", "said", "told"),
    [
        (7, "The logits are not finite.", "line 7: The logits are not finite."),
        (7, "line 7: the prompt is too long.", "line 7: the prompt is too long."),
        (None, "The logits are not finite.", "The logits are not finite."),
    ],
)
def test_a_failed_row_names_its_line_where_it_has_one(line: int | None, said: str, told: str) -> None:
    found = result_row(row(line), failed(said), "m", 1)
    assert (found.status, found.error_code, found.error_message) == ("failed", "numeric_error", told)
    assert found.text is None


@pytest.mark.parametrize("message", [{}, {"status": "odd"}, {"status": "completed", "choices": "none"}])
def test_nonsense_is_told_from_an_answer(message: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        result_row(row(1), message, "m", 1)
