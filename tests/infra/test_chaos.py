"""The chaos run: a short one as it is, and that it would see what it looks for."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from faults.inspection import compare
from faults.schedule import KINDS, make_schedule
from faults.workload import ChaosJob, Expected, make_jobs

from pagemill.jobs.result import ResultRow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)  # a minute where a core is free
def test_a_short_run_loses_and_doubles_nothing(tmp_path: Path) -> None:
    ended = subprocess.run(
        [ROOT / "infra" / "chaos", "--minutes=0.35", "--seed=11", "--gap=1.3", "--jobs=25", "--drain=420",
         f"--json={tmp_path / 'summary.json'}"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (
        f"faults {summary['faults']}, rows {summary['rows']}, lost 0, doubled 0, wrong counts 0"
        in ended.stdout
    )
    assert summary["faults"] >= 10
    assert summary["jobs"] >= 5
    assert summary["rows"] >= 100


def test_a_seed_is_one_schedule_and_one_set_of_jobs() -> None:
    assert make_schedule(5, 60, gap_s=1, ttl_s=2) == make_schedule(5, 60, gap_s=1, ttl_s=2)
    assert make_schedule(5, 60, gap_s=1, ttl_s=2) != make_schedule(6, 60, gap_s=1, ttl_s=2)
    assert make_jobs(5, 60, per_minute=20, kills=1) == make_jobs(5, 60, per_minute=20, kills=1)
    assert make_jobs(5, 60, per_minute=20, kills=1) != make_jobs(6, 60, per_minute=20, kills=1)


def test_a_schedule_has_every_kind_of_fault_where_there_is_time() -> None:
    faults = make_schedule(1, 300, gap_s=2, ttl_s=2)
    assert {fault.kind for fault in faults} == set(KINDS)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert all(fault.at < 300 for fault in faults)
    assert all(fault.lasts > 2 for fault in faults if "past its lease" in fault.kind)


def test_jobs_have_every_fate_and_rows_of_every_kind() -> None:
    jobs = make_jobs(1, 1800, per_minute=20, kills=9)
    assert {job.fate for job in jobs} == {"run", "cancel", "expire", "delete", "retry", "refused"}
    assert {job.sender for job in jobs} == {"plain", "twice", "again", "vanishing", "vanished"}
    assert sum(b"<<kill>>" in job.data for job in jobs) == 9
    codes = {row.code for job in jobs for row in job.rows}
    assert codes >= {
        "",
        "poison_row",
        "numeric_error",
        "duplicate_custom_id",
        "invalid_json_line",
        "url_mismatch",
    }
    for job in jobs:
        lines = [line for line in job.data.split(b"\n") if line.strip()]
        assert job.refusal or len(job.rows) == len(lines)


@pytest.fixture
def job() -> ChaosJob:
    return next(job for job in make_jobs(3, 600, per_minute=20, kills=0) if len(job.rows) > 30)


def row_of(due: Expected) -> ResultRow:
    name = due.custom_id or f"row-{due.row_index}"
    row = ResultRow(due.row_index, name, due.line, "completed", text="x", seed=due.seed)
    if due.code:
        return replace(row, status="failed", text=None, error_code=due.code, error_message="why")
    choices = [{"index": i, "text": text, "finish_reason": "stop"} for i, text in enumerate(due.texts)]
    return replace(row, text=due.texts[0], choices=choices if len(choices) > 1 else None)


def test_what_came_out_as_it_was_due_is_clean(job: ChaosJob) -> None:
    due = {str(row.row_index): row for row in job.rows}
    judged = compare([row_of(row) for row in job.rows], due, None, by_id=False)
    assert (judged.lost, judged.doubled, judged.wrong) == ([], [], [])


def test_rows_that_are_lost_doubled_or_wrong_are_seen(job: ChaosJob) -> None:
    due = {str(row.row_index): row for row in job.rows}
    rows = [row_of(row) for row in job.rows]
    judged = compare([*rows[1:], rows[-1]], due, None, by_id=False)
    assert judged.lost == ["0"]
    assert judged.doubled == [str(len(rows) - 1)]
    assert compare([*rows, replace(rows[0], row_index=10**6)], due, None, by_id=False).doubled == [str(10**6)]
    good = next(row for row in rows if row.status == "completed")
    for changed in (
        replace(good, text="y", choices=None),
        replace(good, seed=1),
        replace(good, custom_id="other"),
        replace(good, line=10**6),
        replace(good, status="failed", text=None, choices=None, error_code="poison_row", error_message="why"),
    ):
        others = [row for row in rows if row is not good]
        assert len(compare([changed, *others], due, None, by_id=False).wrong) == 1, changed


def test_a_stop_may_stand_in_for_rows_but_not_for_bad_lines_nor_under_another_s_name(job: ChaosJob) -> None:
    due = {str(row.row_index): row for row in job.rows}
    stopped = [
        replace(row_of(row), status="failed", text=None, choices=None, error_code="batch_cancelled",
                error_message="why")
        for row in job.rows
    ]  # fmt: skip
    planned = sum(row.planned for row in job.rows)
    assert planned
    assert len(compare(stopped, due, "batch_cancelled", by_id=False).wrong) == planned
    assert len(compare(stopped, due, "batch_expired", by_id=False).wrong) == len(stopped)
