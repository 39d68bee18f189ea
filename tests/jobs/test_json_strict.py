import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.jobs.json_strict import MAX_NESTING, InvalidJson, check_numbers, parse_json

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def refused(data: bytes | str) -> InvalidJson:
    with pytest.raises(InvalidJson) as error:
        parse_json(data.encode() if isinstance(data, str) else data)
    return error.value


@given(values, st.booleans())
def test_what_json_writes_is_read_back(value: Any, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only, allow_nan=False).encode()) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_a_refusal(data: bytes) -> None:
    try:
        value = parse_json(data)
    except InvalidJson as error:
        assert error.code in ("invalid_json_line", "invalid_encoding")
        assert error.message
    else:
        json.dumps(value, allow_nan=False).encode()


@given(
    st.lists(st.sampled_from([*'{}[]",:\\0123456789eE+-.u d8ac tfn', "true", "null", '"a"', "\\ud800"])).map(
        "".join
    )
)
def test_any_scrambled_json_is_a_value_or_a_refusal(text: str) -> None:
    try:
        value = parse_json(text.encode())
    except InvalidJson:
        return
    # What got through survives writing, UTF-8 and reading: no NaN, no infinity, no lone surrogate.
    assert parse_json(json.dumps(value, ensure_ascii=False, allow_nan=False).encode()) == value


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}', '{"a": {"b": [NaN]}}'])
def test_constants_of_javascript_are_refused(text: str) -> None:
    assert "is not JSON" in refused(text).message


@pytest.mark.parametrize("text", ["1e400", "-1E400", "[1e309]", '{"a": 123456789e4000}', "1" * 4000 + ".5"])
def test_numbers_that_overflow_are_refused(text: str) -> None:
    assert "overflows" in refused(text).message


def test_whole_numbers_of_any_size_are_refused_or_kept_exactly() -> None:
    assert parse_json(b"1" * 300) == int("1" * 300)
    assert "overflows" in refused("1" * (sys.get_int_max_str_digits() + 1)).message
    assert "overflows" in refused('{"a": [-%s]}' % ("9" * 100_000)).message


def test_numbers_carried_through_may_not_overflow_a_double() -> None:
    check_numbers({"a": [1, -(2**1023), 1e308, "x", None, {"b": True}]}, "metadata")
    for large in (2**1024, -(10**400)):
        with pytest.raises(InvalidJson, match=r"metadata.*overflows"):
            check_numbers({"a": [{"b": large}]}, "metadata")


@pytest.mark.parametrize(
    "text", ['{"a":1,"a":1}', '[{"b":{"a":1,"x":2,"a":3}}]', r'{"a":1,"\u0061":2}', '{"":0,"":0}']
)
def test_a_key_given_twice_is_refused_at_any_depth(text: str) -> None:
    assert "given twice" in refused(text).message


def test_a_key_given_twice_among_very_many_is_found_at_once() -> None:
    pairs = [f'"{i}":0' for i in range(200_000)]
    assert '"199999"' in refused("{" + ",".join([*pairs, '"199999":1']) + "}").message


def test_one_key_in_two_objects_is_fine() -> None:
    assert parse_json(b'[{"a":{"a":1}},{"a":2}]') == [{"a": {"a": 1}}, {"a": 2}]


@pytest.mark.parametrize(
    "text",
    [
        r'"\ud800"',
        r'"\uDFFF"',
        r'["x\uD83Dx"]',
        r'{"a": {"b": "\udc00\ud83d"}}',
        r'{"\uD800": 1}',
        r'{"a": [{"\udbff": []}]}',
        r'"\ud83d\u0041"',
        r'"\uD83D\uD83D\uDE00"',
    ],
)
def test_half_a_surrogate_pair_is_refused_in_keys_and_values(text: str) -> None:
    assert "surrogate" in refused(text).message


def test_whole_pairs_and_escaped_backslashes_pass() -> None:
    assert parse_json(rb'"\ud83d\ude00 \uD83D\uDE00 \\ud800"') == "😀 😀 \\ud800"


def test_a_surrogate_spelled_in_bytes_is_not_utf_8() -> None:
    assert refused(b'"\xed\xa0\x80"').code == "invalid_encoding"


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + closing * depth


def test_nesting_is_limited() -> None:
    assert parse_json(nested(MAX_NESTING).encode())
    assert "64 levels" in refused(nested(MAX_NESTING + 1)).message
    assert "64 levels" in refused('{"a":' * 65 + "1" + "}" * 65).message
    assert "64 levels" in refused("[" + nested(64) + ',"x"]').message


@pytest.mark.parametrize("depth", [900, 5_000, 1_000_000])
@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"":'])
def test_endless_nesting_breaks_nothing(depth: int, opening: str) -> None:
    refused(opening * depth)
    refused(opening * depth + "1")
    assert refused(opening * depth + "]" * depth).code == "invalid_json_line"


def test_many_brackets_side_by_side_or_inside_strings_are_not_nesting() -> None:
    assert parse_json(json.dumps([[], {}] * 500).encode()) == [[], {}] * 500
    assert parse_json(json.dumps("[" * 5000).encode()) == "[" * 5000


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        ('{"a": 1} {"b": 2}', "more text follows.*column 10.*line of its own"),
        ("{'a': 1}", "column 2"),
        ('{"a": 1,}', "not valid JSON"),
        ('"tab\there"', "control character"),
        ("\ufeff{}", "byte order mark"),
        ("", "column 1"),
        ("nul", "not valid JSON"),
    ],
)
def test_the_message_says_what_is_wrong_and_where(data: str, hint: str) -> None:
    error = refused(data)
    assert error.code == "invalid_json_line"
    with pytest.raises(InvalidJson, match=f"(?i){hint}"):
        raise error


def test_bytes_that_are_not_utf_8_are_named() -> None:
    error = refused(b'{"prompt": "caf\xe9"}')
    assert error.code == "invalid_encoding"
    assert "byte 16 (0xe9)" in error.message
    assert "UTF-8" in error.message
