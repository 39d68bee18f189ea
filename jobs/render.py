"""What people see: a job's status, a list of jobs, a table of results.

On a terminal: colours, bars, lines cut to its width. Piped: plain lines, tabs between fields, nothing cut,
and tables with a head of one line.
Text from a model or a file never reaches a terminal with its control characters. This room knows what a job
looks like and may not know how to reach one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagemill.jobs.status import JobStatus

if TYPE_CHECKING:
    from pagemill.jobs.result import ResultRow

COLOURS = {
    "completed": "green",
    "failed": "red",
    "cancelled": "yellow",
    "expired": "yellow",
    "cancelling": "yellow",
    "expiring": "yellow",
    "failing": "red",
}


def say(line: str) -> None:
    """A note for the person at the terminal; never part of a command's output."""
    print(line, file=sys.stderr)


def print_json(document: Any, *, lines: bool = False) -> None:
    """One JSON document: indented for eyes, one line for programs (and where several follow each other)."""
    indent = 2 if sys.stdout.isatty() and not lines else None
    print(json.dumps(document, ensure_ascii=False, indent=indent), flush=True)


def status_document(status: JobStatus) -> dict[str, Any]:
    """A status as JSON: the public fields of the job's hash, unset ones null."""
    return asdict(status)


def print_status(status: JobStatus) -> None:
    """One job, a field a line."""
    fields: dict[str, str] = {
        "job": status.job,
        "state": status.state,
        "blocked": status.blocked_reason,
        "model": status.model,
        "rows": rows_text(status),
        "tokens": tokens_text(status),
        "shards": f"{status.shards_done:,} of {status.shards_total:,}" if status.shards_total else "",
        "speed": speed_text(status),
        "created": moment(status.created_at),
        "started": moment(status.started_at),
        "finished": moment(status.finished_at),
        "expires": moment(status.expires_at),
        "output": status.output,
        "error": ": ".join(filter(None, (status.error_code, status.error_message))),
    }
    print_fields(fields, {"state": COLOURS.get(status.state, ""), "error": "red", "blocked": "yellow"})


def print_fields(fields: Mapping[str, str], colours: Mapping[str, str] | None = None) -> None:
    """Named values, one a line; empty ones are left out."""
    shown = {name: harmless(value) for name, value in fields.items() if value}
    width = max(map(len, shown), default=0)
    console = Console(soft_wrap=True, highlight=False)
    for name, value in shown.items():
        line = Text().append(f"{name.ljust(width)}  ", "dim")
        console.print(line.append(value, (colours or {}).get(name, "")))


def print_jobs(jobs: Iterable[JobStatus]) -> None:
    """Jobs, one a line under a head, which is the same when piped."""
    if not sys.stdout.isatty():
        for place, job in enumerate(jobs):
            if place == 0:  # nothing has no head
                print(*_JOB_COLUMNS, sep="\t")
            counts = (job.completed, job.failed, job.total)
            print(job.job, job.state, job.model, *counts, moment(job.created_at), sep="\t")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in _JOB_COLUMNS:
        table.add_column(name, justify="right" if name in _COUNTS else "left")
    for job in jobs:
        state = Text(job.state + (" (blocked)" if job.blocked_reason else ""), COLOURS.get(job.state, ""))
        figures = [f"{n:,}" for n in (job.completed, job.failed, job.total)]
        table.add_row(Text(job.job), state, Text(job.model), *figures, moment(job.created_at))
    Console().print(table)


_COUNTS = ("completed", "failed", "rows")
_JOB_COLUMNS = ("job", "state", "model", *_COUNTS, "created")


def print_results(rows: Iterable[ResultRow]) -> int:
    """Results, one a line, as they are read; returns how many."""
    count = 0
    if not sys.stdout.isatty():
        for row in rows:
            print(row.row_index, harmless(row.custom_id), row.status, harmless(_answer(row)), sep="\t")
            count += 1
        return count
    console = Console(highlight=False)
    rest = max(20, console.width - 7 - 17 - 2)
    for row in rows:
        count += 1
        line = Text().append(f"{row.row_index:>5}  ", "dim")
        line.append(_fit(harmless(row.custom_id), 15) + "  ", "cyan")
        line.append(_fit(harmless(_answer(row)), rest).rstrip(), "red" if row.status == "failed" else "")
        console.print(line, no_wrap=True, overflow="ignore", crop=True)
    return count


def _answer(row: ResultRow) -> str:
    if row.status == "failed":
        return f"{row.error_code}: {row.error_message}"
    return row.text or ""


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def harmless(text: str) -> str:
    """One line that cannot move the cursor, ring the bell or change a terminal's title."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _ESCAPES.get(c, f"\\x{ord(c):02x}") for c in text)


_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def moment(seconds: float | None) -> str:
    """A time in the reader's zone; empty when there is none."""
    return (
        "" if seconds is None else datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    )


def span(seconds: float) -> str:
    """A length of time: 4.2 s, 42 s, 3:05, 2:00:00."""
    if 0 <= seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rows_text(status: JobStatus) -> str:
    """How many rows came out, how many failed, of how many; empty before the plan has counted them."""
    if not status.total and not status.terminal:
        return ""
    return f"{status.completed:,} completed, {status.failed:,} failed, of {status.total:,}"


def tokens_text(status: JobStatus) -> str:
    """Tokens read and written so far."""
    share = status.cached_tokens / max(1, status.prompt_tokens)
    cached = f" ({status.cached_tokens:,} cached, {share:.0%})" if status.cached_tokens else ""
    return f"{status.prompt_tokens:,} in{cached}, {status.completion_tokens:,} out"


def speed_text(status: JobStatus) -> str:
    """What is going on now; empty when nothing is."""
    parts = []
    if status.tokens_per_second:
        parts.append(f"{status.tokens_per_second:,.0f} tokens/s")
    if status.eta_seconds is not None and not status.terminal:
        parts.append(f"{span(status.eta_seconds)} left")
    if status.workers_active:
        parts.append(f"{status.workers_active} worker{'s' * (status.workers_active > 1)}")
    return ", ".join(parts)


def hit_rate_text(status: JobStatus) -> str:
    """The share of prompt tokens that were found in the prefix cache."""
    if not status.cached_tokens or not status.prompt_tokens:
        return ""
    return f"{status.cached_tokens / status.prompt_tokens:.0%} cached"


def summary(status: JobStatus) -> str:
    """A status in one line."""
    tokens = f"tokens {tokens_text(status)}" if status.prompt_tokens or status.completion_tokens else ""
    parts = [status.state, rows_text(status), tokens, speed_text(status)]
    if status.blocked_reason and not status.terminal:
        parts.append(f"blocked: {harmless(status.blocked_reason)}")
    if status.error_code:
        parts.append(harmless(f"{status.error_code}: {status.error_message}"))
    return " · ".join(filter(None, parts))
