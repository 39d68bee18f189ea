"""What a job is: lines, plan, state, storage, results, client and commands.

This floor knows nothing of ours beside it and imports no torch: whoever submits, polls and reads results
needs no more than `pip install pagemill`. The public names are loaded when they are first asked for, so
that a worker that wants one module, or a shell that completes a command, does not pay for the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from pagemill.jobs.errors import (
    JobConflict,
    JobFailed,
    JobNotFound,
    PagemillError,
    RedisUnavailable,
    StorageError,
    UsageError,
)

if TYPE_CHECKING:
    from pagemill.jobs.client import Client
    from pagemill.jobs.job import CancelOutcome, Job
    from pagemill.jobs.parquet import ResultRow
    from pagemill.jobs.status import JobStatus
    from pagemill.jobs.sync import SyncClient, SyncJob

__all__ = [
    "CancelOutcome",
    "Client",
    "Job",
    "JobConflict",
    "JobFailed",
    "JobNotFound",
    "JobStatus",
    "PagemillError",
    "RedisUnavailable",
    "ResultRow",
    "StorageError",
    "SyncClient",
    "SyncJob",
    "UsageError",
]

_HOMES: Final = {
    "CancelOutcome": "job",
    "Client": "client",
    "Job": "job",
    "JobStatus": "status",
    "ResultRow": "parquet",
    "SyncClient": "sync",
    "SyncJob": "sync",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value  # asked once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
