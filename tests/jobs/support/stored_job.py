"""A planned job in a store, and its shards done as a worker would, without Redis and without an engine."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any

from pagemill.jobs import layout
from pagemill.jobs.commit import commit_shard
from pagemill.jobs.plan import make_plan, read_shard
from pagemill.jobs.result import ResultRow
from pagemill.jobs.spec import InputRef, JobSpec, default_seed
from pagemill.jobs.storage import Storage

BAD = "not json"


def prompts(count: int, bad: Iterable[int] = ()) -> list[str]:
    """Lines of an input; those named are no JSON."""
    unreadable = set(bad)
    return [BAD if i in unreadable else json.dumps({"prompt": f"question {i}"}) for i in range(count)]


def store_job(storage: Storage, lines: list[str], *, shard_rows: int = 4, **more: Any) -> JobSpec:
    job = f"job-{uuid.uuid4().hex[:12]}"
    key = layout.input(job)
    info = storage.put(key, "".join(line + "\n" for line in lines).encode())
    spec = JobSpec(
        job=job,
        model="tiny",
        created_at=1.5,
        input=InputRef(key=key, size=info.size, etag=info.etag),
        seed=default_seed(job),
        shard_rows=shard_rows,
        **more,
    )
    storage.put(layout.job(job), spec.to_json())
    return spec


def plan_job(storage: Storage, spec: JobSpec, stopped: str | None = None) -> dict[str, Any]:
    return make_plan(storage, spec, fence="0-5", fingerprint="print", stopped=lambda: stopped)


def results(storage: Storage, entry: dict[str, Any], note: str = "") -> list[ResultRow]:
    """What an engine would have made of a shard."""
    return [
        ResultRow(
            row.row_index,
            row.custom_id,
            row.line,
            "completed",
            kind=row.kind,
            text=f"answer {row.row_index}{note}",
            finish_reason="stop",
            prompt_tokens=3,
            completion_tokens=2,
            cached_tokens=1,
            seed=row.seed,
            attempt=1,
            model="tiny",
        )
        for row in read_shard(storage, entry)
    ]


def commit(
    storage: Storage,
    spec: JobSpec,
    entry: dict[str, Any],
    *,
    fence: str = "0-9",
    segments: Iterable[dict[str, Any]] = (),
    rows: Iterable[ResultRow] | None = None,
    note: str = "",
) -> dict[str, Any]:
    return commit_shard(
        storage,
        spec.job,
        entry,
        fence=fence,
        segments=segments,
        rows=results(storage, entry, note) if rows is None else rows,
        expected_row_indexes={row.row_index for row in read_shard(storage, entry)},
    )
