"""The report of an ended job: its figures add up, its page needs nothing else, a real browser draws it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import colours, document, screenshot
from hypothesis import given
from hypothesis import strategies as st
from made_report import T0, made_report
from result_rows import done, failed
from stored_job import commit, plan_job, prompts, results, store_job

from pagemill.jobs.cli import main
from pagemill.jobs.errors import JobConflict, JobNotFound, UsageError
from pagemill.jobs.finalize import finalize
from pagemill.jobs.parquet import batch_of
from pagemill.jobs.report import Clock, Price, Report, binned, gather, percentile, quantile
from pagemill.jobs.report_page import page
from pagemill.jobs.result import ResultRow
from pagemill.jobs.storage import Storage

HOSTILE = '<script>alert(1)</script>"><img src=http://evil.example/x>'
VOID = {"meta", "line", "rect", "br"}


def ended_job(storage: Storage, count: int = 40, stop: dict[str, Any] | None = None, **more: Any) -> str:
    """One answer a second, each of 20 tokens in 4 s; one line is bad and one row failed."""
    spec = store_job(storage, prompts(count, bad=[3]), **{"shard_rows": 10} | more)
    plan = plan_job(storage, spec)
    for entry in plan["shards"]:
        rows: list[ResultRow] = []
        for row in results(storage, entry):
            timed = replace(row, completion_tokens=20, prompt_tokens=100, cached_tokens=25)
            timed = replace(timed, queued_ms=10.0, first_token_ms=100.0, total_ms=4000.0)
            rows.append(replace(timed, finished_at=T0 + row.row_index))
        if entry["shard"] == 0:
            rows[0] = failed(rows[0].row_index, message=HOSTILE, finished_at=T0, attempt=1)
        commit(storage, spec, entry, rows=rows)
    finalize(storage, spec, plan, stop=stop)
    return spec.job


def test_the_figures_of_a_job(local_storage: Storage) -> None:
    report = gather(local_storage, ended_job(local_storage))
    assert report.reasons == {"stop": 38}
    assert report.errors == {"invalid_json_line": 1, "prompt_too_long": 1}
    assert "line 4" in report.examples["invalid_json_line"]
    assert report.prompt == {100: 38}
    assert report.clock.rows == 39  # a bad line never ran
    assert report.clock.cached.total() == 38 * 25
    assert report.clock.span == (int(T0) - 3, int(T0) + 40)
    assert report.clock.working_s == 43
    assert max(rows for _, _, rows in report.clock.running()) == 5  # 4 s each, a new one each second


rows = st.builds(
    lambda index, end, total, first, tokens: done(
        index, finished_at=T0 + end, total_ms=total, first_token_ms=first, completion_tokens=tokens
    ),
    st.integers(0, 99),
    st.floats(0, 500),
    st.floats(0, 90_000),
    st.none() | st.floats(0, 90_000),
    st.integers(0, 5000),
)


@given(st.lists(rows, min_size=1, max_size=30))
def test_every_token_is_somewhere_on_the_clock(found: list[ResultRow]) -> None:
    clock = Clock()
    for row in found:  # however they come in batches
        clock.add(batch_of([row]))
    start, end = clock.span
    levels = list(clock.written())
    total = sum(level * (there - here) for here, there, level in levels)
    assert total == pytest.approx(sum(row.completion_tokens for row in found), abs=1e-6)
    assert clock.read.total() == sum(row.prompt_tokens for row in found)
    assert all(start <= here < there <= end for here, there, _ in levels)
    assert all(level > -1e-6 for _, _, level in levels)
    assert all(rows >= 0 for _, _, rows in clock.running())
    seconds = {
        second
        for row in found
        for second in range(
            int(row.finished_at - (row.total_ms or 0) / 1000),
            int(row.finished_at) + 1,  # type: ignore[operator]
        )
    }
    assert clock.working_s == len(seconds)


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_percentiles_of_times_are_right_to_one_per_cent(times: list[float], share: float) -> None:
    report = Report({})
    report.add(batch_of([done(i, total_ms=ms) for i, ms in enumerate(times)]))
    exact = sorted(times)[max(0, -int(-share * len(times) // 1) - 1)]
    found = percentile(report.times["total_ms"], share)
    assert found == pytest.approx(exact, rel=0.0102, abs=1.0)


@given(st.dictionaries(st.integers(0, 200_000), st.integers(1, 9), max_size=60), st.integers(1, 50))
def test_classes_of_lengths_are_few_and_hold_every_row(counts: dict[int, int], most: int) -> None:
    classes = list(binned(Counter(counts), most))
    assert sum(rows for _, _, rows in classes) == sum(counts.values())
    assert len(classes) <= most + 1  # their bounds are round, so one more may be begun
    assert all(low < high for low, high, _ in classes)
    assert (quantile(Counter(counts), 1.0) if counts else None) == max(counts, default=None)


def test_a_machine_whose_clock_was_years_wrong_does_not_fill_the_page() -> None:
    report = made_report([done(0, finished_at=5.0), done(1, finished_at=T0)])
    text = page(report)
    assert len(text) < 100_000
    assert _Tags(text).open == []


def test_time_in_which_nothing_ran_is_not_paid_for() -> None:
    clock = Clock()
    clock.add(
        batch_of([done(0, finished_at=T0, total_ms=9000.0), done(1, finished_at=T0 + 3600, total_ms=9000.0)])
    )
    assert clock.working_s == 20
    assert Price(3.6, gpus=2).cost(clock.working_s) == pytest.approx(0.04)
    with pytest.raises(UsageError):
        Price(float("nan"))


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: Counter[str] = Counter()
        self.attributes: Counter[str] = Counter()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names[tag] += 1
        self.attributes.update(name for name, _ in attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names[tag] += 1
        self.attributes.update(name for name, _ in attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_by_itself_and_says_nothing_that_runs(local_storage: Storage) -> None:
    text = page(gather(local_storage, ended_job(local_storage)), Price(2.5))
    tags = _Tags(text)
    assert tags.open == []
    assert not tags.names.keys() & {"script", "img", "link", "iframe", "object", "embed", "a", "use", "image"}
    assert not {name for name in tags.attributes if name.startswith("on")} | (
        tags.attributes.keys() & {"src", "href"}
    )
    assert not re.search(r"@import|url\(", text)
    assert "&lt;script&gt;" in text  # the hostile message, as text
    assert tags.names["svg"] == 5


@pytest.mark.parametrize("reason", ["cancelled", "failed"])
def test_a_job_that_did_not_complete_says_why(local_storage: Storage, reason: str) -> None:
    spec = store_job(local_storage, prompts(6))
    plan = plan_job(local_storage, spec)
    stop = {"reason": reason, "error_code": "storage_error", "error_message": f"No <b>room</b>, {HOSTILE}"}
    finalize(local_storage, spec, plan, stop=stop)
    text = page(gather(local_storage, spec.job))
    assert "No &lt;b&gt;room" in text
    assert "No row of this job says when it ended." in text
    assert _Tags(text).open == []


def test_a_job_without_rows_has_a_report(local_storage: Storage) -> None:
    spec = store_job(local_storage, prompts(2), strict=True)
    plan = plan_job(local_storage, spec, stopped="cancelled")
    finalize(local_storage, spec, plan)
    assert _Tags(page(gather(local_storage, spec.job), Price(1.0))).open == []


def test_only_a_job_that_has_ended_has_one(local_storage: Storage) -> None:
    spec = store_job(local_storage, prompts(2))
    with pytest.raises(JobConflict, match="has not ended"):
        gather(local_storage, spec.job)
    with pytest.raises(JobNotFound):
        gather(local_storage, "job-nobody-knows")


def test_the_command_writes_the_file(
    local_storage: Storage,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, store = ended_job(local_storage), str(tmp_path / "store")
    file = tmp_path / "report.html"
    assert main(["report", job, "--store", store, "-o", str(file), "--price", "7200", "--gpus", "2"]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    text = file.read_text()
    assert "<!doctype html>" in text
    assert "172.00" in text  # 43 s of two at 7,200 an hour
    monkeypatch.chdir(tmp_path)
    assert main(["report", job, "--store", store]) == 0
    assert "cost" not in (tmp_path / f"{job}.html").read_text()
    assert main(["report", "job-nobody-knows", "--store", store]) == 3
    assert not (tmp_path / "job-nobody-knows.html").exists()


@pytest.mark.timeout(400)
def test_a_browser_draws_it_in_light_and_dark(local_storage: Storage, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(gather(local_storage, ended_job(local_storage)), Price(2.5)))
    seen = document(file, tmp_path)
    assert seen.count("<svg") == 5
    assert "<script" not in seen
    for dark, ground, bar in (
        (False, (246, 247, 249), (47, 111, 222)),
        (True, (15, 19, 23), (106, 161, 255)),
    ):
        drawn = screenshot(file, tmp_path, dark=dark, size=(500, 640))
        assert drawn[1][1] == ground
        found = colours(drawn)
        assert found[bar] > 5000, f"bars are not drawn: {found.most_common(6)}"
