"""The tasks that need no engine: plan, finalize, and the shards of a job that was stopped.

    plan       make_plan decides plan.json, then Redis adopts it
    shard      of a stopped job: what is sealed is kept, the rest become error rows, one commit record
    finalize   every part checked, manifest.json decided, then Redis ends the job

Each is decided in the store before Redis is told, so any of them may run twice, by anybody. Workers run them
under their leases; `settle_job` runs what is left of one job where no worker is alive, which is how a client
cancels. This room may not know an engine, nor how a worker keeps its leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from pagemill.jobs import layout
from pagemill.jobs.commit import commit_shard, read_commit
from pagemill.jobs.errors import ObjectNotFound, StorageError
from pagemill.jobs.finalize import commit_stopped, finalize, stopped_row
from pagemill.jobs.plan import make_plan, read_shard
from pagemill.jobs.spec import JobSpec
from pagemill.jobs.state import LeaseLost, State, new_nonce
from pagemill.jobs.status import Lease, StopReason
from pagemill.jobs.stopping import stop_that_counts
from pagemill.jobs.storage import Storage, read_json

__all__ = ["WORKS", "Elsewhere", "kept", "read_stop", "settle", "settle_job", "stopped_row"]

TTL_MS = 15_000


Elsewhere = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Does a work of WORKS, given by name with its arguments as JSON, and returns what it decided."""


async def settle(
    state: State,
    storage: Storage,
    lease: Lease,
    *,
    fingerprint: str | None = None,
    stopped_check: Callable[[], str | None] | None = None,
    elsewhere: Elsewhere | None = None,
) -> None:
    """Do the leased task and tell Redis. The caller keeps the lease alive meanwhile.

    fingerprint: of the model that the planner serves, where it serves one. stopped_check: why the job was
    stopped, or None; asked from a thread while planning, by default of the store. elsewhere: who does the
    work, by default a thread of ours. Raises StorageError when the store refuses (try again, nothing is half
    done) and ValueError for a shard of a job that runs.
    """
    args: dict[str, Any] = {"job": lease.job}
    more: dict[str, Any] = {}
    if lease.kind == "plan":
        args |= {"fence": lease.fence, "fingerprint": fingerprint}
        more = {"stopped": stopped_check}
    elif lease.kind == "finalize":
        args |= {"stop": lease.stop}
    else:
        args |= await _stopped_shard(state, storage, lease)
    if elsewhere is not None:
        decided = await elsewhere(lease.kind, args)
    else:
        decided = await asyncio.to_thread(lambda: WORKS[lease.kind](storage, **args, **more))
    if lease.kind == "plan":
        await state.planned(lease.job, lease.fence, decided)
    elif lease.kind == "finalize":
        await state.finalized(lease.job, decided)
    else:
        assert lease.shard is not None
        await state.committed(lease.job, lease.shard, decided)


async def settle_job(state: State, storage: Storage, job: str, model: str) -> None:
    """Do all of one job that needs no engine and that nobody holds; returns when there is nothing to lease.

    A task that a dead worker still holds is free when its lease has run out, and is not waited for.
    """
    us = f"client-{socket.gethostname()}-{os.getpid()}"
    while lease := await state.lease(model, worker=us, nonce=new_nonce(), ttl_ms=TTL_MS, job=job):
        try:
            async with kept(state, us, lease):
                await settle(state, storage, lease)
        except LeaseLost:
            continue  # somebody else does it
        except BaseException:
            with contextlib.suppress(Exception):
                await state.release(lease.job, lease.task, lease.fence)
            raise


@contextlib.asynccontextmanager
async def kept(state: State, worker: str, lease: Lease) -> AsyncIterator[None]:
    """The lease is renewed while the block runs (which must not hold up the event loop)."""

    async def renew() -> None:
        while True:
            await asyncio.sleep(lease.ttl_ms / 3000)
            await state.renew(worker, [(lease.job, lease.task, lease.fence)], lease.ttl_ms)

    task = asyncio.create_task(renew(), name=f"renew {lease.task}")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def read_stop(storage: Storage, job: str) -> dict[str, Any] | None:
    """stop.json: why the job was stopped, whatever Redis knows."""
    return await asyncio.to_thread(read_json, storage, layout.stop(job))


def plan_work(
    storage: Storage,
    job: str,
    fence: str,
    fingerprint: str | None,
    stopped: Callable[[], str | None] | None = None,
) -> dict[str, Any]:
    """Blocks; the plan that counts."""

    def asked() -> str | None:
        stop = read_json(storage, layout.stop(job))
        return None if stop is None else str(stop["reason"])

    return make_plan(
        storage, _spec(storage, job), fence=fence, fingerprint=fingerprint, stopped=stopped or asked
    )


def end_work(
    storage: Storage, job: str, stop: StopReason | None, gave_up: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Blocks; the manifest that counts."""
    spec, plan = _spec(storage, job), _plan(storage, job)
    return finalize(storage, spec, plan, stop=stop_that_counts(storage, job, plan, stop), gave_up=gave_up)


def stopped_work(
    storage: Storage,
    job: str,
    shard: int,
    reason: StopReason,
    fence: str,
    segments: list[dict[str, Any]],
) -> dict[str, Any]:
    """Blocks; the commit record of a shard as its sealed rows and, for all others, error rows."""
    record = read_commit(storage, job, shard)
    if record is not None:
        return record
    return commit_stopped(
        storage,
        _spec(storage, job),
        _entry(storage, job, shard),
        reason,
        fence=fence,
        segments=segments,
    )


def commit_work(
    storage: Storage, job: str, shard: int, fence: str, segments: list[dict[str, Any]]
) -> dict[str, Any]:
    """Blocks; the commit record of a shard all of whose rows are sealed. Raises RowsDoNotMatch."""
    entry = _entry(storage, job, shard)
    expected = {row.row_index for row in read_shard(storage, entry)}
    return commit_shard(
        storage, job, entry, fence=fence, segments=segments, rows=(), expected_row_indexes=expected
    )


WORKS: dict[str, Callable[..., dict[str, Any]]] = {
    "plan": plan_work,
    "finalize": end_work,
    "shard": stopped_work,
    "commit": commit_work,
}


async def _stopped_shard(state: State, storage: Storage, lease: Lease) -> dict[str, Any]:
    job, shard = lease.job, lease.shard
    assert shard is not None
    stop = await read_stop(storage, job)
    reason: StopReason | None = stop["reason"] if stop is not None else lease.stop
    if reason is None:
        raise ValueError(f"{lease.task} of {job} runs: it needs an engine")
    segments = await state.segments(job, shard)
    return {"shard": shard, "reason": reason, "fence": lease.fence, "segments": segments}


def _entry(storage: Storage, job: str, shard: int) -> dict[str, Any]:
    entry: dict[str, Any] = next(e for e in _plan(storage, job)["shards"] if e["shard"] == shard)
    return entry


def _spec(storage: Storage, job: str) -> JobSpec:
    try:
        return JobSpec.load(storage.get(layout.job(job)))
    except ObjectNotFound:
        raise StorageError(f"{storage.url} holds no job {job}: everybody must name the same store.") from None


def _plan(storage: Storage, job: str) -> dict[str, Any]:
    plan = read_json(storage, layout.plan(job))
    if plan is None:
        raise StorageError(f"{storage.url} holds no plan of job {job}.")
    return plan
