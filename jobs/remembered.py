"""What the store remembers of a job that Redis has forgotten: the status that its manifest implies.

This room may not know Redis: it is asked when Redis has no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagemill.jobs import layout
from pagemill.jobs.errors import JobNotFound
from pagemill.jobs.status import JobStatus
from pagemill.jobs.storage import Storage, read_json


def output_url(storage: Storage, job: str) -> str:
    """The folder of a job's parts and manifest, as its status shows it."""
    return f"{storage.url.rstrip('/')}/{layout.root(job).rstrip('/')}"


def from_manifest(job: str, manifest: Mapping[str, Any], output: str) -> JobStatus:
    """The status that a finished job had, for when Redis no longer knows it."""
    counts = {
        name: int(manifest[name])
        for name in ("total", "completed", "failed", "prompt_tokens", "completion_tokens", "cached_tokens")
    }
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


def remembered(storage: Storage, job: str) -> JobStatus:
    """The status of a job that ended and that only the store knows. Raises JobNotFound for any other."""
    manifest = read_json(storage, layout.manifest(job))
    if manifest is not None:
        return from_manifest(job, manifest, output_url(storage, job))
    if storage.head(layout.job(job)) is not None:
        raise JobNotFound(
            f"Redis does not know job {job}, but {storage.url} holds it: a worker rebuilds its state, or "
            f"`pagemill recover {job}`."
        )
    raise JobNotFound(f"There is no job {job}, neither in this Redis nor in {storage.url}.")
