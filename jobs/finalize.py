"""Ending a job: every part checked, manifest.json decided, then _SUCCESS, then what nobody refers to swept.

Any number of processes may do this at once and again: each step either finds that it was done or does the
same. What is an orphan is judged only against the manifest read back from the store, since only that one
counts. This room may not know Redis nor engines; a client without torch can run it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from pagemill.jobs import layout
from pagemill.jobs.commit import (
    PartDamaged,
    check_part,
    commit_shard,
    list_commits,
    list_segments,
    make_part,
    read_sealed,
)
from pagemill.jobs.errors import PreconditionFailed, StorageError
from pagemill.jobs.parquet import ResultRow
from pagemill.jobs.plan import read_shard
from pagemill.jobs.row import Row
from pagemill.jobs.spec import JobSpec
from pagemill.jobs.storage import Storage, decide, read_json

log = logging.getLogger(__name__)

VERSION: Final = 1
LOST: Final = (
    "result_lost",
    "The store damaged this row's result after it was committed: `pagemill retry-failed` runs it again.",
)
LOOK_AGAIN_S: Final = (0.2, 0.5, 1.0, 2.0, 4.0)
"""Pauses after which a part that came back wrong is read again: what a network garbles, it seldom garbles
six times."""
STOPPED: Final = {
    "cancelled": ("batch_cancelled", "The job was cancelled before this row was run."),
    "expired": ("batch_expired", "The job's deadline passed before this row was run."),
    "failed": ("job_failed", "The job failed before this row was run."),
}
FENCE: Final = "0"
"""Of parts that are made while finalizing, lower than any worker's: a worker's finished row wins."""
_SUMS: Final = ("completed", "failed", "prompt_tokens", "completion_tokens", "cached_tokens")


def finalize(
    storage: Storage,
    spec: JobSpec,
    plan: dict[str, Any],
    *,
    stop: dict[str, Any] | None = None,
    gave_up: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Decides the manifest of a job whose shards are all committed; the manifest that counts.

    stop: stop.json, where somebody stopped the job; shards without a commit record then get one, of their
    sealed rows and error rows. A part of a shard that the store has damaged or lost does not keep its job
    from ending: another takes its place, of what is sealed still and of error rows (`result_lost`), and the
    damaged one is left where it is and named in the manifest. gave_up: error_code and error_message of a job
    whose ending kills its process: it fails, with the parts that were committed (and checked then), and
    without a look into any file. Raises StorageError when the store refuses, or when what is damaged cannot
    be replaced.
    """
    found = read_json(storage, layout.manifest(spec.job))
    if found is None:
        reason = "failed" if gave_up else _reason(plan, stop)
        records = _all_commits(storage, spec, plan, reason, segments=[] if gave_up else None)
        parts = [*plan.get("error_parts", ()), *(records[number]["part"] for number in sorted(records))]
        damaged: list[str] = []
        if not gave_up:
            parts, damaged = _sound_parts(storage, spec, plan, parts)
        weights = read_json(storage, layout.model(spec.job)) or plan
        manifest = _manifest(spec, plan, gave_up or stop, reason, parts, weights.get("fingerprint") or "")
        manifest["damaged"] = damaged
        found, _ = decide(storage, layout.manifest(spec.job), manifest)
    with suppress(PreconditionFailed):
        storage.put(layout.success(spec.job), b"", if_absent=True)
    try:
        sweep(storage, spec.job)
    except StorageError as error:
        # The job has ended whether or not the store lets us tidy up.
        log.warning("orphans of %s were not swept: %s", spec.job, error)
    return found


def sweep(storage: Storage, job: str) -> None:
    """Deletes segments, parts that the manifest does not list, and shards of plans that do not count.

    Does nothing for a job without a manifest: as long as it runs, any of these may be about to count.
    """
    manifest = read_json(storage, layout.manifest(job))
    if manifest is None:
        return
    plan = read_json(storage, layout.plan(job)) or {}
    kept = {part["key"] for part in manifest["parts"]} | {entry["key"] for entry in plan.get("shards", ())}
    kept.update(manifest.get("damaged", ()))  # somebody may still get something out of them
    for prefix in (layout.work(job), layout.parts(job), layout.shards(job)):
        storage.delete(info.key for info in storage.list(prefix) if info.key not in kept)
    storage.delete([layout.hint(manifest["model"], job)])


def stopped_row(row: Row, reason: str, model: str) -> ResultRow:
    """What a row becomes that its job's stop left unfinished. reason: cancelled, expired or failed."""
    code, message = STOPPED[reason]
    return ResultRow.error_row(row, code, message, model=model)


def commit_stopped(
    storage: Storage,
    spec: JobSpec,
    shard_entry: dict[str, Any],
    reason: str,
    *,
    fence: str = FENCE,
    segments: Iterable[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Commits a shard of a stopped job: its sealed rows, and an error row for each other one.

    segments: as Redis knows them, by default as the store does. Returns the commit record that counts.
    """
    if segments is None:
        segments = list_segments(storage, spec.job, shard_entry["shard"])
    rows = read_shard(storage, shard_entry)
    sealed = read_sealed(storage, segments)
    left = [row for row in rows if row.row_index not in sealed.row_indexes]
    return commit_shard(
        storage,
        spec.job,
        shard_entry,
        fence=fence,
        segments=sealed.segments,
        rows=(stopped_row(row, reason, spec.model) for row in left),
        expected_row_indexes={row.row_index for row in rows},
    )


def _reason(plan: dict[str, Any], stop: dict[str, Any] | None) -> str | None:
    """Why the job ends before all its rows ran; None where they did."""
    if plan.get("refused"):
        return "failed"
    reason = (stop or {}).get("reason") or plan.get("stopped")
    if reason is not None and reason not in STOPPED:
        raise StorageError(f"stop.json gives {reason!r} as the reason, which no job is stopped for.")
    return reason


def _all_commits(
    storage: Storage,
    spec: JobSpec,
    plan: dict[str, Any],
    reason: str | None,
    *,
    segments: list[dict[str, Any]] | None = None,
) -> dict[int, dict[str, Any]]:
    """The commit record of every shard of the plan."""
    records = list_commits(storage, spec.job)
    entries = {int(entry["shard"]): entry for entry in plan.get("shards", ())}
    missing = entries.keys() - records.keys()
    if missing and reason is None:
        raise StorageError(
            f"{spec.job} cannot be finalized: {len(missing)} of its {len(entries)} shards are not committed."
        )
    for number in sorted(missing):
        records[number] = commit_stopped(storage, spec, entries[number], str(reason), segments=segments)
    return {number: records[number] for number in entries}


def _sound_parts(
    storage: Storage, spec: JobSpec, plan: dict[str, Any], parts: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Parts that are what they should be, and the keys of those among the given ones that were not."""
    with ThreadPoolExecutor(4, thread_name_prefix="pagemill-check") as pool:
        sound = list(pool.map(lambda part: _is_sound(storage, part), parts))
    entries = {entry["shard"]: entry for entry in plan.get("shards", ())}
    found = [
        part if good else _replaced(storage, spec, entries, part)
        for part, good in zip(parts, sound, strict=True)
    ]
    return found, [part["key"] for part, good in zip(parts, sound, strict=True) if not good]


def _is_sound(storage: Storage, part: dict[str, Any]) -> bool:
    for pause in LOOK_AGAIN_S:
        with suppress(PartDamaged):
            check_part(storage, part)
            return True
        time.sleep(pause)
    try:
        check_part(storage, part)
    except PartDamaged as error:
        log.error("%s", error)
        return False
    return True


def _replaced(
    storage: Storage, spec: JobSpec, entries: dict[int, dict[str, Any]], part: dict[str, Any]
) -> dict[str, Any]:
    """A part for one that the store damaged: what is sealed of its shard, and the rest as error rows."""
    entry = entries.get(part["shard"])
    if entry is None:
        raise StorageError(
            f"The part {part['key']} in {storage.url} is damaged and holds bad lines, which are kept nowhere"
            " else: put a copy of it back, or delete the job and submit its input again."
        )
    rows = {row.row_index: row for row in read_shard(storage, entry)}
    sealed = read_sealed(storage, list_segments(storage, spec.job, part["shard"]))
    lost = [row for row_index, row in rows.items() if row_index not in sealed.row_indexes]
    made = make_part(
        storage,
        spec.job,
        part["shard"],
        FENCE,
        sealed.segments,
        (ResultRow.error_row(row, *LOST, model=spec.model) for row in lost),
        set(rows),
    )
    log.warning("%s takes the place of %s: %d of its rows are lost", made["key"], part["key"], len(lost))
    return made


def _manifest(
    spec: JobSpec,
    plan: dict[str, Any],
    stop: dict[str, Any] | None,
    reason: str | None,
    parts: list[dict[str, Any]],
    fingerprint: str,
) -> dict[str, Any]:
    total = int(plan.get("total", 0))
    rows = sum(int(part["rows"]) for part in parts)
    if rows != total:
        raise StorageError(
            f"{spec.job} cannot be finalized: its plan has {total} rows and its parts have {rows}."
        )
    errors = Counter[str]()
    for part in parts:
        errors.update(part.get("errors", {}))
    refused = plan.get("refused") or {}
    why = refused or {
        "code": (stop or {}).get("error_code", ""),
        "message": (stop or {}).get("error_message", ""),
    }
    return {
        "version": VERSION,
        "job": spec.job,
        "state": reason or "completed",
        "model": spec.model,
        "fingerprint": fingerprint,
        "total": total,
        **{name: sum(int(part[name]) for part in parts) for name in _SUMS},
        "errors": dict(sorted(errors.items())),
        "parts": parts,
        "created_at": spec.created_at,
        "finished_at": time.time(),
        "error_code": why["code"] or "",
        "error_message": why["message"] or "",
    }
