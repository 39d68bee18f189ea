"""What a one-shot run came to, for people and for programs: rows, counts, where everything is, what to do
next.

This room may not know how the run was done.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pagemill.jobs import layout, render
from pagemill.jobs.reading import Results
from pagemill.jobs.storage import read_json
from pagemill.worker.oneshot import Outcome

# So many rows are shown whole; of more, the first few and the first failed ones.
WHOLE, FIRST, FAILED, LOOKED_AT = 60, 10, 10, 100_000


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """The outcome as JSON."""
    status, manifest = outcome.status, _manifest(outcome)
    return {
        "job": status.job,
        "state": status.state,
        "total": status.total,
        "completed": status.completed,
        "failed": status.failed,
        "errors": manifest.get("errors", {}),
        "prompt_tokens": status.prompt_tokens,
        "completion_tokens": status.completion_tokens,
        "cached_tokens": status.cached_tokens,
        "seconds": round(outcome.seconds, 3) if outcome.fresh else None,
        "tokens_per_second": _speed(outcome),
        "store": outcome.storage.url,
        "manifest": _place(outcome, layout.manifest(status.job)),
        "parts": [_place(outcome, part["key"]) for part in manifest.get("parts", [])],
    }


def print_outcome(outcome: Outcome, *, rows: bool) -> None:
    """The outcome in words. rows: with the rows themselves, while they are few."""
    status = outcome.status
    if rows:
        _print_rows(outcome)
    if not outcome.fresh:
        print("This job had ended before; nothing was run again.")
    manifest = _manifest(outcome)
    parts = manifest.get("parts", [])
    render.print_fields(
        {
            "job": status.job,
            "state": status.state,
            "rows": render.rows_text(status),
            "errors": ", ".join(f"{code} {count:,}" for code, count in manifest.get("errors", {}).items()),
            "tokens": render.tokens_text(status),
            "speed": _speed_text(outcome),
            "parquet": f"{_files(parts)} in {_place(outcome, layout.parts(status.job))}" if parts else "",
            "manifest": _place(outcome, layout.manifest(status.job)),
        },
        {"state": render.COLOURS.get(status.state, ""), "errors": "red"},
    )
    if status.state == "completed":
        _print_next(outcome)


def _print_rows(outcome: Outcome) -> None:
    results, total = Results(outcome.storage, outcome.status.job), outcome.status.total
    if total <= WHOLE:
        render.print_results(results)
    else:
        render.print_results(islice(results, FIRST))
        print(f"… and {total - FIRST:,} more.")
        if outcome.status.failed:
            print("The first that failed:")
            failed = (row for row in islice(results, LOOKED_AT) if row.status == "failed")
            render.print_results(islice(failed, FAILED))
    if total:
        print()


def _print_next(outcome: Outcome) -> None:
    job, store = outcome.status.job, shlex.quote(_shown(outcome.storage.url))
    print("\nNext:")
    pagemill, python = _program("pagemill"), _program("python")
    print(f"  {pagemill} results {job} --store {store} --format jsonl")
    print(f"  {pagemill} results {job} --store {store} --format openai --output answers.jsonl")
    program = f"from pagemill.jobs import SyncClient; print(SyncClient(store={_shown(outcome.storage.url)!r})"
    print(f'  {python} -c "{program}.results({job!r}).table())"')


def _program(name: str) -> str:
    """How a shell calls what is installed beside this Python: by name, where its PATH leads there, else by
    place."""
    beside = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not beside.exists() or (found is not None and Path(found).parent.resolve() == beside.parent.resolve()):
        return name
    # Never resolved: a virtual environment's Python is a link, and what it points to lacks our libraries.
    return shlex.quote(_near(beside))


def _files(parts: Sequence[object]) -> str:
    return "1 file" if len(parts) == 1 else f"{len(parts):,} files"


def _manifest(outcome: Outcome) -> dict[str, Any]:
    return read_json(outcome.storage, layout.manifest(outcome.status.job)) or {}


def _speed(outcome: Outcome) -> float | None:
    """Tokens that the job has written in a second of running, loading the model included."""
    if not outcome.fresh or not outcome.seconds:
        return None
    return round(outcome.status.completion_tokens / outcome.seconds, 1)


def _speed_text(outcome: Outcome) -> str:
    speed = _speed(outcome)
    if not speed:
        return ""
    again = f", {render.span(outcome.seconds_now)} of it in this run"
    return f"{speed:,.1f} tokens/s out, {render.span(outcome.seconds)} in all" + (
        again if outcome.seconds_now < outcome.seconds else ""
    )


def _place(outcome: Outcome, key: str) -> str:
    return f"{_shown(outcome.storage.url).rstrip('/')}/{key}"


def _shown(url: str) -> str:
    """A folder as a path, relative where it lies below the working directory; any other store as it is."""
    if not url.startswith("file://"):
        return url
    return _near(Path(unquote(urlsplit(url).path)))


def _near(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
