import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.jobs.parameters import (
    MAX_SAMPLES,
    NOTHING,
    READERS,
    Refusal,
    check_together,
    read_parameters,
    shown,
)


def refused(raw: dict[str, Any]) -> Refusal:
    with pytest.raises(Refusal) as error:
        read_parameters(raw)
    return error.value


@pytest.mark.parametrize(
    ("name", "given_value", "canonical"),
    [
        ("max_tokens", 1, 1),
        ("max_tokens", 16.0, 16),
        ("max_completion_tokens", 5, 5),
        ("min_tokens", 0, 0),
        ("temperature", 0, 0.0),
        ("temperature", 2, 2.0),
        ("temperature", 1e-9, 0.0),
        ("top_p", 0, 0.0),
        ("top_p", 1, 1.0),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("top_k", 40, 40),
        ("min_p", 0, 0.0),
        ("n", 128, 128),
        ("seed", 0, 0),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("stop", "END", ["END"]),
        ("stop", ["a", "b", "a"], ["a", "b"]),
        ("stop", [], []),
        ("stop_token_ids", [0, 2], [0, 2]),
        ("stop_token_ids", [], []),
        ("ignore_eos", False, False),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 0, 0.0),
        ("repetition_penalty", 1, 1.0),
        ("logit_bias", {"50256": -100, "0": 0.5}, {"50256": -100.0, "0": 0.5}),
        ("logit_bias", {}, {}),
        ("truncate_prompt_tokens", 1, 1),
    ],
)
def test_a_value_in_range_is_kept_in_canonical_form(name: str, given_value: Any, canonical: Any) -> None:
    result = read_parameters({name: given_value})
    key = "max_tokens" if name == "max_completion_tokens" else name
    assert result == {key: canonical}
    assert type(result[key]) is type(canonical)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "10"),
        ("max_tokens", True),
        ("max_tokens", 2**31),
        ("max_tokens", [1]),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", 10**400),
        ("top_p", 1.01),
        ("top_p", -1),
        ("top_k", -2),
        ("top_k", 0.5),
        ("min_p", 2),
        ("n", 0),
        ("n", 129),
        ("n", False),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", "7"),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop", "x" * 1025),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [1] * 1025),
        ("ignore_eos", 1),
        ("ignore_eos", "false"),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"07": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"9999999999": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", [1]),
        ("logit_bias", {str(i): 1 for i in range(4097)}),
        ("logprobs", 21),
        ("logprobs", "yes"),
        ("top_logprobs", -1),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -1),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    error = refused({name: value})
    assert error.code == "invalid_request"
    assert f"`{name}" in error.message


def test_every_parameter_of_the_documentation_is_read() -> None:
    assert set(READERS) == {
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "truncate_prompt_tokens",
    }


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [("max_tokens", 10**18, 2**31 - 1), ("seed", 2**64, 2**63 - 1), ("n", 10**6, MAX_SAMPLES)],
)
def test_a_number_that_is_too_large_is_told_the_limit(name: str, value: int, limit: int) -> None:
    assert f"`{name}` must be {limit} or less" in str(refused({name: value}))


@pytest.mark.parametrize("name", sorted(READERS) + sorted(NOTHING))
def test_null_means_not_set(name: str) -> None:
    assert read_parameters({name: None}) == {}


@pytest.mark.parametrize(
    "raw",
    [
        {"stream": False},
        {"store": True},
        {"store": False},
        {"user": "u-1"},
        {"service_tier": "auto"},
        {"response_format": {"type": "text"}},
        {"tools": []},
        {"tool_choice": "none"},
        {"best_of": 1},
        {"echo": False},
    ],
)
def test_what_means_nothing_is_accepted(raw: dict[str, Any]) -> None:
    assert read_parameters(raw) == {}


def test_values_that_change_nothing_are_kept_because_they_override_defaults() -> None:
    assert read_parameters({"logit_bias": {}, "n": 1}) == {"logit_bias": {}, "n": 1}


@pytest.mark.parametrize(
    "raw",
    [
        {"stream": True},
        {"stream": 0},
        {"store": 1},
        {"user": 5},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "text", "x": 1}},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "auto"},
        {"functions": [{}]},
        {"best_of": 2},
        {"best_of": True},
        {"echo": True},
        {"suffix": "end"},
        {"reasoning_effort": "low"},
        {"use_beam_search": True},
        {"guided_json": {"type": "object"}},
        {"frobnicate": 0},
        {"": 1},
        {"Temperature": 1},
    ],
)
def test_what_is_not_supported_is_refused_by_name_and_never_ignored(raw: dict[str, Any]) -> None:
    error = refused(raw)
    (name,) = raw
    assert error.code == "unsupported_parameter"
    assert f"`{name}`" in error.message


def test_a_slip_of_the_pen_is_pointed_out() -> None:
    assert "did you mean `temperature`?" in refused({"temprature": 0.5}).message
    assert "did you mean `max_tokens`?" in refused({"max_token": 5}).message
    assert "`metadata`" in refused({"category": "news"}).message


def test_two_names_of_one_limit_may_agree_and_not_differ() -> None:
    assert read_parameters({"max_tokens": 5, "max_completion_tokens": 5}) == {"max_tokens": 5}
    assert "`max_completion_tokens` 6" in refused({"max_tokens": 5, "max_completion_tokens": 6}).message


@pytest.mark.parametrize(
    ("raw", "alternatives"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": 3}, 3),
        ({"logprobs": 0}, 0),
        ({"logprobs": 3, "top_logprobs": 3}, 3),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"top_logprobs": 0}, None),
    ],
)
def test_both_ways_to_ask_for_logprobs_become_one_number(
    raw: dict[str, Any], alternatives: int | None
) -> None:
    assert read_parameters(raw) == {"logprobs": alternatives}


@pytest.mark.parametrize(
    "raw", [{"top_logprobs": 2}, {"logprobs": False, "top_logprobs": 2}, {"logprobs": 3, "top_logprobs": 2}]
)
def test_contradictions_about_logprobs_are_refused(raw: dict[str, Any]) -> None:
    assert "`logprobs`" in refused(raw).message


def test_more_at_least_than_at_most_is_refused() -> None:
    assert "`min_tokens` 6" in refused({"min_tokens": 6, "max_tokens": 5}).message
    with pytest.raises(Refusal):
        check_together({"min_tokens": 6, "max_tokens": 5})
    check_together({"min_tokens": 5, "max_tokens": 5})


def test_a_shown_value_is_short() -> None:
    assert shown("x" * 1_000_000) == '"' + "x" * 36 + '..."'
    assert shown({"a": 1}) == "an object"
    assert shown([1, 2]) == "a list of 2"
    assert len(shown(10**3000)) < 50
    assert shown([]) == "[]"
    assert shown(None) == "null"


@given(st.text(max_size=50))
def test_a_shown_text_is_printable_json(text: str) -> None:
    assert shown(text).isprintable()
    if len(text) <= 20:
        assert json.loads(shown(text)) == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*READERS, *NOTHING, "other"]), json_values, max_size=5))
def test_any_object_is_read_or_refused_and_reading_again_changes_nothing(raw: dict[str, Any]) -> None:
    try:
        params = read_parameters(raw)
    except Refusal as error:
        assert error.code in ("invalid_request", "unsupported_parameter")
        return
    assert read_parameters(params) == {name: value for name, value in params.items() if value is not None}
