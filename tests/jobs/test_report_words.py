"""The report's words: no length of time without a unit, no number too long, nothing that turns a line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.jobs.report_words import LONGEST_TEXT, count, elapsed, foreign, length, money, percent, rows


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0 s"), (0.0004, "0 ms"), (0.38, "380 ms"), (1, "1 s"), (4.24, "4.2 s"), (59.6, "1 min"),
        (185, "3 min 5 s"), (7200, "2 h"), (7260, "2 h 1 min"), (86400, "1 d"), (800_000, "9 d 6 h"),
    ],
)  # fmt: skip
def test_a_length_of_time_names_its_units(seconds: float, told: str) -> None:
    assert length(seconds) == told


@given(st.floats(0.001, 1e9))
def test_a_length_of_time_is_right_to_its_second_unit(seconds: float) -> None:
    units = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "d": 86400}
    words = length(seconds).replace(",", "").split()
    sizes = [units[name] for name in words[1::2]]
    told = sum(float(number) * size for number, size in zip(words[::2], sizes, strict=True))
    assert len(sizes) <= 2
    assert told == pytest.approx(seconds, rel=0.05 if len(sizes) == 1 else 0.017, abs=0.0005)


def test_marks_of_an_axis_share_one_unit() -> None:
    assert [elapsed(step)(3 * step) for step in (5, 30, 60, 900, 1800, 21600, 86400)] == [
        "15 s", "90 s", "3 min", "45 min", "1.5 h", "18 h", "3 d",
    ]  # fmt: skip
    assert elapsed(60)(0) == "0"


@given(st.integers(0, 10**15))
def test_a_count_fits_a_tile(number: int) -> None:
    assert len(count(number)) <= 10
    assert len(money(float(number))) <= 10
    if number < 1_000_000:
        assert count(number).replace(",", "") == str(number)


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_some_are_never_told_as_none_or_as_all(part: int, more: int) -> None:
    told = percent(part, part + more)
    assert (told == "100%") == (part > 0 and more == 0)
    assert (told in ("0%", "0.00%")) == (part == 0 and more > 0)
    assert told != "100.00%"


def test_one_row_is_no_rows() -> None:
    assert [rows(number) for number in (0, 1, 1.0, 2, 0.1428, 12_000)] == [
        "0 rows", "1 row", "1 row", "2 rows", "0.143 rows", "12,000 rows",
    ]  # fmt: skip


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_what_others_wrote_is_one_short_line_that_reads_forwards(text: str) -> None:
    told = foreign(text)
    assert len(told) <= LONGEST_TEXT
    assert told.isprintable()
