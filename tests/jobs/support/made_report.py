"""A report of rows that a test made, without a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagemill.jobs.parquet import batch_of
from pagemill.jobs.report import Report
from pagemill.jobs.result import ResultRow

T0 = 1_780_000_000.0


def made_report(rows: Sequence[ResultRow], **manifest: Any) -> Report:
    """manifest: what it says other than the rows."""
    completed = sum(row.status == "completed" for row in rows)
    said = {
        "job": "job-1",
        "model": "org/model",
        "state": "completed",
        "created_at": T0,
        "finished_at": T0 + 60,
        "error_code": "",
        "error_message": "",
        "total": len(rows),
        "completed": completed,
        "failed": len(rows) - completed,
        "prompt_tokens": sum(row.prompt_tokens for row in rows),
        "completion_tokens": sum(row.completion_tokens for row in rows),
        "cached_tokens": sum(row.cached_tokens for row in rows),
    }
    report = Report(said | manifest)
    if rows:
        report.add(batch_of(list(rows)))
    return report
