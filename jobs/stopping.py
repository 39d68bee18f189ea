"""Stopping a job: stop.json first, so that a lost Redis does not bring it back to life, then its state.

A job may come to its end in the moment between. So a stop.json alone stops nothing: the state machine decides
and refuses from finalizing on, and what it refused is seen in no row. `stop_that_counts` says which it was,
for whoever finalizes or rebuilds. This room may not know who asks, nor how tasks are leased.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from pagemill.jobs import layout
from pagemill.jobs.commit import list_commits
from pagemill.jobs.finalize import STOPPED
from pagemill.jobs.state import State
from pagemill.jobs.status import TERMINAL, StopOutcome, StopReason
from pagemill.jobs.storage import Storage, decide, read_json

TOO_LATE = TERMINAL | {"finalizing"}


async def stop_job(
    state: State,
    storage: Storage,
    job: str,
    reason: StopReason,
    *,
    error_code: str = "",
    error_message: str = "",
) -> StopOutcome:
    """Ask that the job stops; accepted says that it ends, or ended, for this reason.

    error_code, error_message: of the job, where it fails.

    Harmless to repeat. Raises JobNotFound when Redis does not know the job.
    """
    known = await state.status(job)
    if known is not None and known.state in TOO_LATE:
        return await state.stop(job, reason)  # refused, unless it was accepted before
    wanted: dict[str, Any] = {"reason": reason, "at": time.time()}
    if error_code:
        wanted |= {"error_code": error_code, "error_message": error_message}
    stop, _ = await asyncio.to_thread(decide, storage, layout.stop(job), wanted)
    words = (stop.get("error_code", ""), stop.get("error_message", ""))
    outcome = await state.stop(job, stop["reason"], *words)
    return StopOutcome(outcome.accepted and stop["reason"] == reason, outcome.state)


def stop_that_counts(
    storage: Storage, job: str, plan: Mapping[str, Any] | None, accepted: StopReason | None = None
) -> dict[str, Any] | None:
    """Why the job ends before all its rows ran, as stop.json says; None where it does not.

    accepted: what the state machine says. Where it knows of no stop, because it refused this one or was
    restored from an older copy, the objects say: a shard that bears the stop's error rows, or that is not
    committed, was stopped; a job whose rows all ran was not.
    """
    stop = read_json(storage, layout.stop(job))
    if accepted is not None:
        return stop or {"reason": accepted}
    if stop is None or plan is None or plan.get("stopped") or stop["reason"] not in STOPPED:
        return stop
    code, _ = STOPPED[stop["reason"]]
    commits = list_commits(storage, job)
    if any(entry["shard"] not in commits for entry in plan["shards"]):
        return stop
    return stop if any(code in commit["part"].get("errors", {}) for commit in commits.values()) else None
