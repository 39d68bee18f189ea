"""How the report looks: in a window of any width, with figures of any size, with little in it."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest
from browser import layout_faults
from made_report import T0, made_report
from result_rows import done, failed

from pagemill.jobs.report import Price, Report
from pagemill.jobs.report_page import page

STYLE = files("pagemill.jobs").joinpath("report.css").read_text()


def usual(count: int = 40, *, apart_s: float = 1) -> Report:
    return made_report([
        done(i, finished_at=T0 + i * apart_s, total_ms=4000.0, first_token_ms=100.0, queued_ms=9.0,
             prompt_tokens=90 + i, completion_tokens=20 + 7 * i, cached_tokens=20)
        for i in range(count)
    ])  # fmt: skip


def huge() -> Report:
    """Of 50 million rows over nine days, every name and number as long as it gets."""
    names = {"job": "j" * 128, "model": "x" * 1024, "state": "expired", "damaged": ["jobs/" + "k" * 300]}
    counts = {"total": 10**9, "completed": 99_999_999, "failed": 99_999_999}
    tokens = {"prompt_tokens": 31_204_532_100, "completion_tokens": 13_204_532_100, "cached_tokens": 10**10}
    slow = {"total_ms": 9e7, "first_token_ms": 8e7, "queued_ms": 7e7}
    bad = [failed(0, "unsupported_parameter", "w" * 4000, finished_at=T0), failed(1, "c" * 90, "m " * 200)]
    rows = [
        done(i, finished_at=T0 + i * 8000, prompt_tokens=10 * i * i, completion_tokens=9 * i, **slow)
        for i in range(2, 100)
    ]
    report = made_report([*bad, *rows], **names, **counts, **tokens)
    report.reasons.update({"stop": 99_000_000, "length": 900_000})
    return report


@pytest.mark.timeout(400)
@pytest.mark.parametrize("width", [420, 1280])
def test_nothing_sticks_out_lies_over_another_is_too_small_or_lost_in_print(
    tmp_path: Path, width: int
) -> None:
    for number, report in enumerate([usual(), usual(1), usual(apart_s=180), huge()]):
        file = tmp_path / f"report{number}.html"
        file.write_text(page(report, Price(2.5, 4096)))
        assert layout_faults(file, tmp_path, width=width) == []


def test_paper_is_light_whatever_the_screen_was() -> None:
    asked = re.findall(r"@media ([^{]*prefers-color-scheme[^{]*) \{", STYLE)
    assert asked == ["screen and (prefers-color-scheme: dark)"]


def _luminance(colour: str) -> float:
    """WCAG 2, relative luminance."""
    if len(colour) == 4:
        colour = "#" + "".join(letter * 2 for letter in colour[1:])
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_texts_and_bars_stand_out_and_stacked_bars_from_each_other(scheme: int) -> None:
    colour = dict(re.findall(r"--(\w+): (#\w+)", re.findall(r":root \{([^}]*)\}", STYLE)[scheme]))
    for text in ("text", "dim", "good", "bad", "warn"):
        assert min(_contrast(colour[text], colour[ground]) for ground in ("page", "card")) >= 4.5, text
    for bar in "abcd":
        assert _contrast(colour[bar], colour["card"]) >= 3, bar
    assert _contrast(colour["b"], colour["c"]) >= 1.8  # told apart in grey too


def test_one_length_is_a_bar_and_not_a_wall() -> None:
    text = page(usual(1))
    chart = re.findall(r"<svg.*?</svg>", text)[3]
    assert [float(width) for width in re.findall(r'<rect[^>]*width="([\d.]+)%"', chart)] == [
        pytest.approx(100 / 12, abs=0.2)
    ]
    assert re.findall(r'class="tick end"[^>]*>([^<]*)', chart) == ["0", "1"]  # there are no half rows


def test_a_few_very_long_rows_do_not_press_the_others_into_one_bar() -> None:
    rows = [done(i, prompt_tokens=100 + i % 50) for i in range(999)]
    text = page(made_report([*rows, done(999, prompt_tokens=100_000)]))
    assert "longest 100,000. 1 row of more than 149 is not drawn." in text
    assert re.findall(r"<svg.*?</svg>", text)[0].count("<rect") == 25


def test_what_there_is_none_of_is_said_and_not_drawn() -> None:
    nothing = page(made_report([failed(i, "job_failed", "its job failed") for i in range(3)], state="failed"))
    assert "<svg" not in nothing
    assert nothing.count("No row completed.") == 1
    assert "No row says how long it took." in nothing
    failing = page(made_report([failed(0, "engine_error", "it broke", finished_at=T0, total_ms=2000.0)]))
    assert failing.count("<svg") == 1  # rows were in the engines, and no token was read or written
    assert failing.count("None at any time.") == 2


def test_one_row_that_never_ran_is_one() -> None:
    text = page(made_report([done(0, finished_at=T0), failed(1, "job_failed", "its job failed")]))
    assert "1 row never ran, or does not say when it ended" in text


def test_every_axis_names_its_unit() -> None:
    charts = re.findall(r"<svg.*?</svg>", page(usual()))
    assert [re.findall(r'class="unit[^>]*>([^<]+)', chart) for chart in charts] == [
        ["tokens/s", "since the first row began"],
        ["tokens/s", "since the first row began"],
        ["rows", "since the first row began"],
        ["rows", "tokens of the prompt"],
        ["rows", "tokens of the answer"],
    ]
    marks = re.findall(r'class="tick(?: odd)?"[^>]*>([^<]*)', charts[0])
    assert marks == ["0", "10 s", "20 s", "30 s", "40 s"]


def test_the_last_bar_is_not_lower_for_being_narrower() -> None:
    rows = [done(i, finished_at=T0 + i, total_ms=0.0, prompt_tokens=100) for i in range(101)]
    chart = re.findall(r"<svg.*?</svg>", page(made_report(rows)))[0]
    bars = re.findall(r'<rect class="b"[^>]*width="([\d.]+)%" height="([\d.]+)"', chart)
    heights = [float(height) for _, height in bars]
    assert len(bars) == 51
    assert float(bars[-1][0]) < 0.6 * float(bars[0][0])
    assert all(one == pytest.approx(other) for one, other in pairwise(heights))


def test_a_job_of_many_days_is_told_in_days() -> None:
    text = page(made_report([done(i, finished_at=T0 + i * 86_400, total_ms=60_000.0) for i in range(30)]))
    chart = re.findall(r"<svg.*?</svg>", text)[0]
    assert re.findall(r'class="tick(?: odd)?"[^>]*>([^<]*)', chart) == [
        "0", "5 d", "10 d", "15 d", "20 d", "25 d",
    ]  # fmt: skip


def test_what_a_job_says_cannot_turn_the_line_around_it() -> None:
    text = page(
        made_report([failed(0, message="\u202eevil\x1b[31m")], model="m\u202e", error_code="storage_error",
                    error_message="\u202ewhy")
    )  # fmt: skip
    assert not re.search("[\u202e\x1b]", text)
    assert "\\x202eevil" in text
