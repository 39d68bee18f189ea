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
from collections.abc import AsyncIterator, Callable
from typing import Any

from pagemill.jobs import layout
from pagemill.jobs.commit import read_commit
from pagemill.jobs.errors import ObjectNotFound, StorageError
from pagemill.jobs.finalize import commit_stopped, finalize, stopped_row
from pagemill.jobs.plan import make_plan
from pagemill.jobs.spec import JobSpec
from pagemill.jobs.state import LeaseLost, State, new_nonce
from pagemill.jobs.status import Lease, StopReason
from pagemill.jobs.stopping import stop_that_counts
from pagemill.jobs.storage import Storage, read_json

__all__ = ["kept", "read_stop", "settle", "settle_job", "stopped_row"]

TTL_MS = 15_000


async def settle(
    state: State,
    storage: Storage,
    lease: Lease,
    *,
    fingerprint: str | None = None,
    stopped_check: Callable[[], str | None] | None = None,
) -> None:
    """Do the leased task and tell Redis. The caller keeps the lease alive meanwhile.

    fingerprint: of the model that the planner serves, where it serves one. stopped_check: why the job was
    stopped, or None; asked from a thread while planning, by default of the store. Raises StorageError when
    the store refuses (try again, nothing is half done) and ValueError for a shard of a job that runs.
    """
    if lease.kind == "plan":
        await _settle_plan(state, storage, lease, fingerprint, stopped_check)
    elif lease.kind == "finalize":
        await _settle_end(state, storage, lease)
    else:
        await _settle_shard(state, storage, lease)


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


async def _settle_plan(
    state: State,
    storage: Storage,
    lease: Lease,
    fingerprint: str | None,
    stopped_check: Callable[[], str | None] | None,
) -> None:
    job = lease.job

    def asked() -> str | None:
        stop = read_json(storage, layout.stop(job))
        return None if stop is None else str(stop["reason"])

    def work() -> dict[str, Any]:
        spec = _spec(storage, job)
        return make_plan(
            storage, spec, fence=lease.fence, fingerprint=fingerprint, stopped=stopped_check or asked
        )

    plan = await asyncio.to_thread(work)
    await state.planned(job, lease.fence, plan)


async def _settle_end(state: State, storage: Storage, lease: Lease) -> None:
    def work() -> dict[str, Any]:
        spec = _spec(storage, lease.job)
        plan = _plan(storage, lease.job)
        return finalize(storage, spec, plan, stop=stop_that_counts(storage, lease.job, plan, lease.stop))

    manifest = await asyncio.to_thread(work)
    await state.finalized(lease.job, manifest)


async def _settle_shard(state: State, storage: Storage, lease: Lease) -> None:
    job, shard = lease.job, lease.shard
    assert shard is not None
    stop = await read_stop(storage, job)
    reason: StopReason | None = stop["reason"] if stop is not None else lease.stop
    if reason is None:
        raise ValueError(f"{lease.task} of {job} runs: it needs an engine")
    segments = await state.segments(job, shard)
    record = await asyncio.to_thread(_commit_stopped, storage, lease, shard, reason, segments)
    await state.committed(job, shard, record)


def _commit_stopped(
    storage: Storage, lease: Lease, shard: int, reason: StopReason, segments: list[dict[str, Any]]
) -> dict[str, Any]:
    """Commits a shard as its sealed rows and, for all others, error rows."""
    record = read_commit(storage, lease.job, shard)
    if record is not None:
        return record
    spec = _spec(storage, lease.job)
    entry = next(entry for entry in _plan(storage, lease.job)["shards"] if entry["shard"] == shard)
    return commit_stopped(
        storage, spec, entry, reason, fence=lease.fence, attempt=lease.attempt, segments=segments
    )


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
