"""What the store remembers of a job that Redis has forgotten: the status that its objects imply.

This room may not know Redis: it is asked when Redis has no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pagemill.jobs import layout
from pagemill.jobs.errors import JobNotFound
from pagemill.jobs.spec import JobSpec
from pagemill.jobs.status import JobStatus
from pagemill.jobs.storage import Storage, read_json

COUNTS: Final = ("completed", "failed", "prompt_tokens", "completion_tokens", "cached_tokens")
DRAINS_AS: Final = {"cancelled": "cancelling", "expired": "expiring", "failed": "failing"}


def output_url(storage: Storage, job: str) -> str:
    """The folder of a job's parts and manifest, as its status shows it."""
    return f"{storage.url.rstrip('/')}/{layout.root(job).rstrip('/')}"


def from_manifest(job: str, manifest: Mapping[str, Any], output: str) -> JobStatus:
    """The status that a finished job had, for when Redis no longer knows it."""
    counts = {name: int(manifest[name]) for name in ("total", *COUNTS)}
    shards = sum(part["shard"] >= 0 for part in manifest["parts"])
    values = {
        **counts,
        "state": manifest["state"],
        "model": manifest["model"],
        "shards_total": shards,
        "shards_done": shards,
        "created_at": manifest.get("created_at") or "",
        "finished_at": manifest.get("finished_at") or "",
        "updated_at": manifest.get("finished_at") or "",
        "output": output,
        "error_code": manifest.get("error_code") or "",
        "error_message": manifest.get("error_message") or "",
    }
    return JobStatus.from_hash(job, {name: str(value) for name, value in values.items()})


def from_objects(storage: Storage, spec: JobSpec) -> JobStatus:
    """The status of a job that has not ended, as its decisions say: what is committed, and nothing newer."""
    from pagemill.jobs.commit import list_commits  # with Arrow, which takes a quarter of a second to load

    plan = read_json(storage, layout.plan(spec.job))
    stop = read_json(storage, layout.stop(spec.job))
    parts = [record["part"] for record in list_commits(storage, spec.job).values()]
    shards = len((plan or {}).get("shards", ()))
    values: dict[str, Any] = {name: sum(int(part[name]) for part in parts) for name in COUNTS}
    values["failed"] += int((plan or {}).get("failed", 0))
    values |= {
        "total": (plan or {}).get("total", 0),
        "state": _state(plan, stop, shards > len(parts)),
        "model": spec.model,
        "shards_total": shards,
        "shards_done": len(parts),
        "created_at": spec.created_at,
        "expires_at": spec.expires_at or "",
        "output": output_url(storage, spec.job),
        "blocked_reason": f"Redis has lost this job: a worker rebuilds it, or `pagemill recover {spec.job}`.",
    }
    return JobStatus.from_hash(spec.job, {name: str(value) for name, value in values.items()})


def _state(plan: Mapping[str, Any] | None, stop: Mapping[str, Any] | None, shards_left: bool) -> str:
    if plan is not None and not shards_left:
        return "finalizing"
    if stop is not None:
        return DRAINS_AS[stop["reason"]]
    return "validating" if plan is None else "in_progress"


def remembered(storage: Storage, job: str) -> JobStatus:
    """The status of a job that only the store knows. Raises JobNotFound where it does not either."""
    manifest = read_json(storage, layout.manifest(job))
    if manifest is not None:
        return from_manifest(job, manifest, output_url(storage, job))
    spec = None if storage.head(layout.tombstone(job)) is not None else read_json(storage, layout.job(job))
    if spec is None:
        raise JobNotFound(f"There is no job {job}, neither in this Redis nor in {storage.url}.")
    return from_objects(storage, JobSpec.model_validate(spec))
