"""From cells to lines: prompt columns, templates, and rows that can be no prompt."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.jobs.columns import Columns, holes
from pagemill.jobs.errors import UsageError
from pagemill.jobs.request import UNREADABLE


def line(columns: Columns, **cells: Any) -> dict[str, Any]:
    columns.needed(list(cells))
    return columns.liner()(cells)


def test_a_column_of_texts_token_ids_or_messages_is_the_prompt() -> None:
    by_name = Columns(prompt="q")
    assert line(by_name, q="text", other=1) == {"prompt": "text"}
    assert line(by_name, q=[1, 2]) == {"prompt": [1, 2]}
    messages = [{"role": "user", "content": "hi", "name": None}]
    assert line(by_name, q=messages) == {"messages": [{"role": "user", "content": "hi"}]}
    assert line(Columns(prompt="q", chat=True), q="hi") == {"messages": [{"role": "user", "content": "hi"}]}


def test_a_template_takes_cells_of_every_kind() -> None:
    columns = Columns(template="{{{a b}}} {n} {d} {l} {t}", id="n")
    cells = {"a b": "x{y}", "n": 7, "d": date(2026, 5, 1), "l": ["é", True], "t": Decimal("1.10")}
    assert line(columns, **cells) == {"custom_id": "7", "prompt": '{x{y}} 7 2026-05-01 ["é", true] 1.10'}


@pytest.mark.parametrize(
    ("columns", "cells", "words"),
    [
        (Columns(prompt="q"), {"q": None}, "`q` is null"),
        (Columns(prompt="q"), {"q": 5}, "holds 5, which is no prompt"),
        (Columns(prompt="q"), {"q": []}, "no prompt"),
        (Columns(template="a {q}", id="i"), {"q": None, "i": "x"}, "`q` is null, and the template"),
    ],
)
def test_a_row_that_is_no_prompt_says_why_and_keeps_its_id(
    columns: Columns, cells: dict[str, Any], words: str
) -> None:
    made = line(columns, **cells)
    assert words in made[UNREADABLE]
    assert made.get("custom_id") == cells.get("i")


def test_without_names_columns_are_fields_and_nulls_are_unset() -> None:
    made = line(Columns(), prompt="x", max_tokens=3, seed=None, metadata={"at": date(2026, 5, 1)})
    assert made == {"prompt": "x", "max_tokens": 3, "metadata": {"at": "2026-05-01"}}
    texts = Columns().liner(texts=True)({"prompt": "7", "id": "1", "max_tokens": "3", "stop": "."})
    assert texts == {"prompt": "7", "id": "1", "max_tokens": 3, "stop": "."}
    with pytest.raises(UsageError, match="'score' is no field"):
        line(Columns(), prompt="x", score=1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Columns(prompt="a", template="{a}"), "not both"),
        (lambda: Columns(template="no hole").needed(["a"]), "names no column"),
        (lambda: Columns(template="{a} }").needed(["a"]), "stray '}' at character 5"),
        (lambda: Columns(template="{}").needed(["a"]), "stray '{}'"),
        (lambda: Columns(prompt="b").needed(["a", "c"]), "no column 'b'; the table has 'a', 'c'"),
        (lambda: Columns(prompt="a").needed(["a", "a"]), "2 columns 'a'"),
        (lambda: Columns().needed(["text"]), "no column `prompt` or `messages` but 'text'"),
    ],
)
def test_what_is_wrong_with_the_table_is_one_sentence(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


@given(
    st.lists(st.tuples(st.text(), st.text(st.characters(exclude_characters="{}"), min_size=1)), min_size=1)
)
def test_any_text_and_any_names_come_through_a_template(pieces: list[tuple[str, str]]) -> None:
    template = "".join(f"{text.replace('{', '{{').replace('}', '}}')}{{{name}}}" for text, name in pieces)
    cells = {name: f"<{name}>" for _, name in pieces}
    assert set(holes(template)) == set(cells)
    made = line(Columns(template=template), **cells)
    assert made["prompt"] == "".join(f"{text}<{name}>" for text, name in pieces)
    json.dumps(made)
