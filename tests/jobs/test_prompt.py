from typing import Any

import pytest

from pagemill.jobs.parameters import Refusal
from pagemill.jobs.prompt import read_messages, read_prompt


def test_messages_keep_role_and_text() -> None:
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo"},
    ]
    assert read_messages(messages) == messages


def test_a_developer_counts_as_the_system() -> None:
    assert read_messages([{"role": "developer", "content": "Be brief."}]) == [
        {"role": "system", "content": "Be brief."}
    ]


def test_text_parts_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}, {"type": "text", "text": ""}]
    assert read_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "one two"}]


def test_empty_fields_that_clients_write_are_let_through() -> None:
    message = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": [],
        "annotations": [],
        "name": None,
    }
    assert read_messages([message]) == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    ("messages", "code", "names"),
    [
        ([], "invalid_request", "`messages` is empty"),
        ("hello", "invalid_request", "`messages` must be a list"),
        ({"role": "user"}, "invalid_request", "`messages` must be a list"),
        (["hello"], "invalid_request", "`messages[0]`"),
        ([{"role": "user"}], "invalid_request", "`messages[0].content` is missing"),
        ([{"role": "user", "content": None}], "invalid_request", "`messages[0].content` is missing"),
        ([{"role": "user", "content": 5}], "invalid_request", "`messages[0].content` must be"),
        ([{"role": "user", "content": {}}], "invalid_request", "`messages[0].content` must be"),
        ([{"role": "user", "content": []}], "invalid_request", "`messages[0].content` is an empty list"),
        ([{"role": "user", "content": ["a"]}], "invalid_request", "`messages[0].content[0]`"),
        ([{"role": "user", "content": [{"text": "a"}]}], "invalid_request", "`messages[0].content[0].type`"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "invalid_request",
            "`messages[0].content[0].text`",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "unsupported_parameter",
            "`messages[0].content[0].type`",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}],
            "unsupported_parameter",
            "`messages[0].content[0].cache_control`",
        ),
        ([{"content": "x"}], "invalid_request", "`messages[0].role` is missing"),
        ([{"role": "robot", "content": "x"}], "invalid_request", '`messages[0].role` is "robot"'),
        ([{"role": ["user"], "content": "x"}], "invalid_request", "`messages[0].role`"),
        ([{"role": "tool", "content": "x"}], "unsupported_parameter", "`messages[0].role`"),
        (
            [{"role": "user", "content": "x"}, {"role": "user", "content": "x", "name": "Ann"}],
            "unsupported_parameter",
            "`messages[1].name`",
        ),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
            "unsupported_parameter",
            "`messages[0].tool_calls`",
        ),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(messages: Any, code: str, names: str) -> None:
    with pytest.raises(Refusal) as error:
        read_messages(messages)
    assert error.value.code == code
    assert names in error.value.message


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("Hello", "Hello", None),
        (" ", " ", None),
        (["Hello"], "Hello", None),
        ([1, 2, 3], None, [1, 2, 3]),
        ([0], None, [0]),
        ([[1, 2]], None, [1, 2]),
    ],
)
def test_a_prompt_is_a_text_or_token_ids(prompt: Any, text: str | None, ids: list[int] | None) -> None:
    assert read_prompt(prompt) == (text, ids)


@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        ("", "`prompt` is empty"),
        ([""], "`prompt` is empty"),
        ([], "`prompt` is an empty list"),
        ([[]], "`prompt` is an empty list"),
        (["a", "b"], "`prompt` holds 2 prompts"),
        ([[1], [2]], "`prompt` holds 2 prompts"),
        ([1, "a"], "list of token ids"),
        ([1, True], "list of token ids"),
        ([1.0], "list of token ids"),
        ([-1], "no token id"),
        ([2**31], "no token id"),
        ([[["a"]]], "`prompt`"),
        (5, "`prompt` must be"),
        ({}, "`prompt` must be"),
        (True, "`prompt` must be"),
    ],
)
def test_a_wrong_prompt_is_refused(prompt: Any, names: str) -> None:
    with pytest.raises(Refusal) as error:
        read_prompt(prompt)
    assert error.value.code == "invalid_request"
    assert names in error.value.message
