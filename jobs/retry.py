"""The failed rows of a job as a job of its own: the same rows, ids and seeds, so what succeeds is what would
have come out.

Rows come from the shards of the plan, which hold them with the job's defaults worked in; so the new job has
no defaults. Only rows that may end otherwise are worth it: a line that is no request fails again, and was
never part of a shard. This room may not know Redis.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from pagemill.jobs import layout
from pagemill.jobs.errors import ROW_CODES, JobConflict, JobNotFound, UsageError
from pagemill.jobs.parquet import read_batches
from pagemill.jobs.plan import read_shard
from pagemill.jobs.row import Row
from pagemill.jobs.storage import Storage, read_json
from pagemill.jobs.submission import read_spec

WORTH_IT: Final = frozenset({"batch_cancelled", "batch_expired", "job_failed", "engine_error", "result_lost"})
"""Codes of rows that were not run, or failed for no reason of their own."""
CHOOSABLE: Final = WORTH_IT | {"prompt_too_long", "template_error", "numeric_error", "poison_row"}
"""The others fail again with the same model on the same kind of machine, but who asks may know better."""
MAX_LINE_BYTES: Final = 1 << 30


def chosen_codes(codes: Collection[str] | None) -> frozenset[str]:
    """The codes to retry. Raises UsageError for one whose rows cannot run."""
    for code in codes or ():
        if code not in ROW_CODES:
            raise UsageError(f"{code} is no code of a row; {', '.join(sorted(CHOOSABLE))} can be retried.")
        if code not in CHOOSABLE:
            raise UsageError(f"A row that is {code} fails again: mend its line and submit it.")
    return frozenset(codes) if codes else WORTH_IT


def failed_rows(storage: Storage, job: str, codes: Collection[str]) -> Iterator[dict[str, Any]]:
    """The input lines of a job's rows that failed with one of these codes, a shard at a time.

    Raises JobNotFound, JobConflict while the job has not ended, and UsageError when there are none.
    """
    manifest = read_json(storage, layout.manifest(job))
    if manifest is None:
        if storage.head(layout.job(job)) is None:
            raise JobNotFound(f"There is no job {job} in {storage.url}.")
        raise JobConflict(f"Job {job} has not ended; what failed is known when it has.")
    if not manifest["total"] and manifest["state"] != "completed":
        raise UsageError(_without_rows(storage, job, manifest))
    if not set(codes) & manifest["errors"].keys():
        raise UsageError(_nothing_to_retry(job, manifest["errors"]))
    return _lines(storage, job, manifest, frozenset(codes))


def _nothing_to_retry(job: str, errors: Mapping[str, int]) -> str:
    """Why no row of an ended job is to be run again, and what to do with those that failed."""
    if not errors:
        return f"Job {job} has no failed rows."
    what = ", ".join(f"{code} {count:,}" for code, count in errors.items())
    asked = sorted(errors.keys() & CHOOSABLE)
    advice = "mend their lines and submit those"
    if asked:
        advice = f"to run {' and '.join(asked)} again all the same, say so (--code {asked[0]})"
        if len(asked) < len(errors):
            advice += "; mend the other lines and submit those"
    return f"Of job {job} no failed row ends otherwise when it runs again ({what}): {advice}."


def _without_rows(storage: Storage, job: str, manifest: Mapping[str, Any]) -> str:
    """Of a job that ended before its plan: why it has no rows, and what to do instead."""
    spec = read_spec(storage, job)
    kept = f"{storage.url.rstrip('/')}/{spec.input.key}" if spec is not None else "the file"
    if manifest["state"] == "failed" and manifest["error_code"]:
        return (
            f"Job {job} failed before its lines became rows ({manifest['error_code']}), so there are none to "
            "retry: mend its input and submit that."
        )
    how = {"cancelled": "was cancelled", "expired": "expired"}.get(manifest["state"], "failed")
    return (
        f"Job {job} {how} before its lines became rows, so there are none to retry: submit its input again; "
        f"{kept} holds it."
    )


def terms(storage: Storage, job: str) -> dict[str, Any]:
    """What the new job has from the old one, and how it names it: fields of a JobSpec."""
    spec = read_spec(storage, job)
    if spec is None:
        raise JobNotFound(f"There is no job {job} in {storage.url}.")
    kept = spec.model_dump(
        include={"model", "seed", "priority", "max_shards", "context", "special_tokens_in_content",
                 "model_policy", "shard_tokens", "shard_rows", "retention_s"}
    )  # fmt: skip
    return {**kept, "created_at": time.time(), "max_line_bytes": MAX_LINE_BYTES, "retry_of": job}


def _lines(
    storage: Storage, job: str, manifest: Mapping[str, Any], codes: frozenset[str]
) -> Iterator[dict[str, Any]]:
    plan = read_json(storage, layout.plan(job)) or {}
    entries = {entry["shard"]: entry for entry in plan.get("shards", ())}
    for part in manifest["parts"]:
        if part["shard"] in entries and codes & part.get("errors", {}).keys():
            wanted = _indexes(storage, part, codes)
            rows = (row for row in read_shard(storage, entries[part["shard"]]) if row.row_index in wanted)
            yield from map(_line, sorted(rows, key=lambda row: row.row_index))


def _indexes(storage: Storage, part: Mapping[str, Any], codes: frozenset[str]) -> set[int]:
    found: set[int] = set()
    with storage.as_file(part["key"]) as path:
        for batch in read_batches(path, columns=["row_index", "error_code"], name=part["key"]):
            rows = zip(batch["row_index"].to_pylist(), batch["error_code"].to_pylist(), strict=True)
            found |= {row_index for row_index, code in rows if code in codes}
    return found


def _line(row: Row) -> dict[str, Any]:
    """The row as a bare input line that gives it again; what it left to the model stays left to it."""
    prompt = row.prompt if row.prompt_token_ids is None else row.prompt_token_ids
    asked: dict[str, Any] = {"prompt": prompt} if row.messages is None else {"messages": row.messages}
    line = {"custom_id": row.custom_id, **asked, **row.params, "seed": row.seed}
    if "logprobs" in row.params and row.params["logprobs"] is None:
        line["logprobs"] = False  # a word for "none"; null would be "not set"
    if row.requested_model is not None:
        line["model"] = row.requested_model
    if row.metadata is not None:
        line["metadata"] = row.metadata
    return line
