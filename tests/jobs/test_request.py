import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.jobs.errors import TEXT_CODES, RowFault
from pagemill.jobs.lines import Line
from pagemill.jobs.spec import InputRef, JobSpec, Row, parse_row, row_seed


def spec(**fields: Any) -> JobSpec:
    return JobSpec(
        **{
            "job": "j",
            "model": "m",
            "created_at": 0.0,
            "input": InputRef(key="k", size=1, etag="e"),
            "seed": 7,
            **fields,
        }
    )


def parse(doc: Any, job: JobSpec | None = None, *, number: int = 3, row_index: int = 1) -> Row | RowFault:
    data = doc if isinstance(doc, bytes) else json.dumps(doc).encode()
    return parse_row(Line(number, row_index, data), job or spec())


def row(doc: Any, job: JobSpec | None = None) -> Row:
    result = parse(doc, job)
    assert isinstance(result, Row), result
    return result


def fault(doc: Any, job: JobSpec | None = None) -> RowFault:
    result = parse(doc, job)
    assert isinstance(result, RowFault), result
    assert result.code in TEXT_CODES
    assert result.line == 3
    assert result.message.startswith("line 3: ")
    return result


CHAT = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
HI = [{"role": "user", "content": "Hi"}]


def test_the_openai_shape() -> None:
    body = {
        "model": "gpt-4o",
        "messages": HI,
        "max_tokens": 5,
        "temperature": 0,
        "metadata": {"k": [1]},
        "seed": 9,
    }
    assert row(CHAT | {"body": body}) == Row(
        row_index=1,
        line=3,
        custom_id="a",
        kind="chat",
        messages=HI,
        prompt=None,
        prompt_token_ids=None,
        params={"max_tokens": 5, "temperature": 0.0},
        seed=9,
        requested_model="gpt-4o",
        metadata={"k": [1]},
    )


def test_the_openai_shape_for_completions() -> None:
    got = row({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": ["Once"]}})
    assert (got.kind, got.prompt, got.messages) == ("completion", "Once", None)


def test_the_bare_shapes() -> None:
    assert row({"prompt": "Hi", "id": "x"}).custom_id == "x"
    assert row({"prompt": [1, 2]}).prompt_token_ids == [1, 2]
    got = row({"messages": HI, "top_k": 0, "custom_id": "y", "model": "other"})
    assert (got.kind, got.custom_id, got.params, got.requested_model) == ("chat", "y", {"top_k": 0}, "other")


def test_a_row_without_an_id_is_named_by_its_index() -> None:
    got = row({"prompt": "Hi"})
    assert (got.custom_id, got.filled_id) == ("row-1", True)
    assert not row({"prompt": "Hi", "custom_id": "row-1"}).filled_id
    assert row({"prompt": "Hi", "custom_id": None}).filled_id


def test_a_row_without_a_seed_has_one_of_the_job_and_its_index() -> None:
    assert row({"prompt": "Hi"}).seed == row_seed(7, 1)
    assert row({"prompt": "Hi", "seed": 0}).seed == 0
    assert row({"prompt": "Hi"}, spec(defaults={"seed": 5})).seed == 5
    assert "seed" not in row({"prompt": "Hi", "seed": 3}).params


def test_a_rows_parameters_stand_over_the_jobs() -> None:
    job = spec(defaults={"temperature": 0.5, "max_tokens": 9, "logprobs": 2, "stop": "x"})
    got = row({"prompt": "Hi", "temperature": 0, "logprobs": False, "stop": []}, job)
    assert got.params == {"temperature": 0.0, "max_tokens": 9, "logprobs": None, "stop": []}
    assert row({"prompt": "Hi", "temperature": None}, job).params["temperature"] == 0.5


def test_a_row_that_contradicts_a_default_is_the_one_at_fault() -> None:
    assert "min_tokens" in fault({"prompt": "Hi", "min_tokens": 10}, spec(defaults={"max_tokens": 9})).message


def test_the_model_is_replaced_and_recorded_or_must_match() -> None:
    assert row({"prompt": "Hi", "model": "other"}).requested_model == "other"
    job = spec(model_policy="match")
    assert row({"prompt": "Hi", "model": "m"}, job).requested_model == "m"
    assert row({"prompt": "Hi"}, job).requested_model is None
    got = fault({"prompt": "Hi", "model": "other"}, job)
    assert got.code == "model_mismatch"
    assert '"other"' in got.message
    assert '"m"' in got.message


@pytest.mark.parametrize(
    ("doc", "code", "names"),
    [
        ([], "invalid_request", "a list"),
        ([{"prompt": "a"}], "invalid_request", "a list"),
        ("hello", "invalid_request", "a string"),
        (5, "invalid_request", "not 5"),
        (None, "invalid_request", "not null"),
        ({}, "invalid_request", "`prompt` or `messages` is missing"),
        ({"prompt": None}, "invalid_request", "is missing"),
        ({"foo": 1}, "unsupported_parameter", "under `metadata`; and `prompt` or `messages` is missing"),
        ({"temperature": 9}, "invalid_request", "not 9; and `prompt` or `messages` is missing"),
        ({"promt": "a"}, "unsupported_parameter", "did you mean `prompt`?; and `prompt` or"),
        (
            CHAT | {"body": {"mesages": HI}},
            "unsupported_parameter",
            "did you mean `messages`?; and `messages` is",
        ),
        ({"prompt": "a", "foo": 1}, "unsupported_parameter", "put data of your own under `metadata`"),
        ({"prompt": "a", "messages": HI}, "invalid_request", "both"),
        ({"prompt": "a", "custom_id": 5}, "invalid_request", "`custom_id` must be a string, not 5"),
        ({"prompt": "a", "id": ["x"]}, "invalid_request", "`id`"),
        ({"prompt": "a", "custom_id": ""}, "invalid_request", "`custom_id` is empty"),
        ({"prompt": "a", "custom_id": "x" * 1025}, "invalid_request", "`custom_id` is longer"),
        ({"prompt": "a", "custom_id": "x", "id": "y"}, "invalid_request", "`custom_id` and `id`"),
        ({"prompt": "a", "model": 5}, "invalid_request", "`model`"),
        ({"prompt": "a", "model": ""}, "invalid_request", "`model`"),
        ({"prompt": "a", "metadata": "x"}, "invalid_request", "`metadata`"),
        ({"prompt": "a", "metadata": {"x": 10**400}}, "invalid_json_line", "`metadata`"),
        ({"prompt": "a", "url": "https://example.org"}, "unsupported_parameter", "`url`"),
        ({"prompt": "a", "tools": [{}]}, "unsupported_parameter", "`tools`"),
        ({"messages": []}, "invalid_request", "`messages` is empty"),
        ({"messages": [{"role": "user"}]}, "invalid_request", "`messages[0].content`"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_request", "`messages[0].content`"),
        (CHAT, "invalid_request", "`body`"),
        (CHAT | {"body": []}, "invalid_request", "`body`"),
        (CHAT | {"body": {"messages": HI}, "method": "GET"}, "invalid_request", "`method`"),
        (CHAT | {"body": {"messages": HI}, "method": 1}, "invalid_request", "`method`"),
        (
            {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a"}},
            "invalid_request",
            "`method`",
        ),
        ({"custom_id": "a", "method": "POST", "body": {"prompt": "a"}}, "invalid_request", "`url`"),
        (CHAT | {"body": {"messages": HI}, "url": "/v1/embeddings"}, "url_mismatch", "/v1/embeddings"),
        (CHAT | {"body": {"prompt": "a"}}, "url_mismatch", "`prompt`"),
        (CHAT | {"body": {"messages": HI}, "url": "/v1/completions"}, "url_mismatch", "`messages`"),
        (CHAT | {"body": {}}, "invalid_request", "`messages` is missing"),
        (CHAT | {"body": {"messages": HI}, "max_tokens": 5}, "unsupported_parameter", "`max_tokens`"),
        (CHAT | {"body": {"messages": HI, "custom_id": "b"}}, "unsupported_parameter", "`body.custom_id`"),
        (CHAT | {"body": {"messages": HI, "stream": True}}, "unsupported_parameter", "`stream`"),
    ],
)
def test_a_bad_line_says_what_is_wrong(doc: Any, code: str, names: str) -> None:
    got = fault(doc)
    assert got.code == code
    assert names in got.message


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'{"prompt": "a"', "invalid_json_line"),
        (b'{"prompt": NaN}', "invalid_json_line"),
        (b'{"prompt": "a", "prompt": "b"}', "invalid_json_line"),
        (rb'{"prompt": "\ud800"}', "invalid_json_line"),
        (b'{"prompt": "a", "temperature": 1e999}', "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (b'{"prompt": "caf\xe9"}', "invalid_encoding"),
    ],
)
def test_a_line_that_cannot_be_read_is_a_fault(data: bytes, code: str) -> None:
    assert fault(data).code == code


def test_a_fault_keeps_the_id_where_it_could_be_read() -> None:
    assert fault({"custom_id": "mine", "prompt": ""}).custom_id == "mine"
    assert fault({"id": "mine", "method": "GET", "url": "", "body": {}}).custom_id == "mine"
    assert fault({"custom_id": 5, "prompt": "a"}).custom_id is None


def test_what_was_wrong_with_the_line_already_stays_the_fault() -> None:
    known = RowFault("line_too_long", "line 3: too long", 3)
    assert parse_row(Line(3, 1, b"", known), spec()) is known


def test_no_message_repeats_a_prompt() -> None:
    secret = "my secret is 12345 " * 20
    for doc in (
        {"prompt": {secret: secret}},
        {"messages": secret},
        {"messages": [{"role": "user", "content": [secret]}]},
    ):
        assert secret[:60] not in fault(doc).message


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = [
    "custom_id",
    "id",
    "method",
    "url",
    "body",
    "prompt",
    "messages",
    "model",
    "metadata",
    "max_tokens",
    "stop",
]
chosen = st.sampled_from(
    ["POST", "/v1/completions", "hello", [1], [{"role": "user", "content": "x"}], {"prompt": "x"}]
)


@given(st.dictionaries(st.sampled_from(NAMES), json_values | chosen, max_size=6))
def test_any_object_is_a_row_or_a_fault_and_a_row_survives_being_written(doc: dict[str, Any]) -> None:
    result = parse(doc)
    if isinstance(result, RowFault):
        assert result.code in TEXT_CODES
        return
    assert Row.from_json(result.to_json()) == result
    assert sum(value is not None for value in (result.messages, result.prompt, result.prompt_token_ids)) == 1
    assert result.to_json().encode().count(b"\n") == 0
