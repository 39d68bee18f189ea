"""Deleting a job with everything of it, so that it stays deleted.

    tombstone.json     the decision: no rebuild brings the job back, and its id is not used again
    Redis              forgets it
    manifest.json      readers find no job from here on
    all other objects  what a crash leaves, the same call takes away when it is made again

This room may not know who asks, nor how a running job is stopped.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from pagemill.jobs import layout
from pagemill.jobs.errors import JobConflict, JobNotFound
from pagemill.jobs.state import State
from pagemill.jobs.storage import Storage, decide


async def delete_job(state: State, storage: Storage, job: str) -> None:
    """Deletes a job that has ended. Raises JobConflict for one that has not, as far as its objects tell or
    Redis knows, JobNotFound for one that never was."""
    deleted = await asyncio.to_thread(storage.head, layout.tombstone(job)) is not None
    known = await state.status(job)
    if known is None and not deleted:
        await asyncio.to_thread(_check_ended, storage, job)
    if known is not None and not known.terminal and not deleted:
        raise JobConflict(f"Job {job} is {known.state}: cancel it first.")
    if not deleted:
        await asyncio.to_thread(decide, storage, layout.tombstone(job), {"job": job, "at": time.time()})
    with suppress(JobNotFound):
        await state.delete(job, decided=True)
    await asyncio.to_thread(_delete_objects, storage, job)


async def forget_deleted(state: State, storage: Storage, job: str) -> bool:
    """Whether the job was deleted; then Redis forgets it, which it may have known again from an older copy.

    Raises StorageError.
    """
    if await asyncio.to_thread(storage.head, layout.tombstone(job)) is None:
        return False
    with suppress(JobNotFound):
        await state.delete(job, decided=True)
    return True


def _check_ended(storage: Storage, job: str) -> None:
    if storage.head(layout.manifest(job)) is not None:
        return
    if storage.head(layout.job(job)) is None:
        raise JobNotFound(f"There is no job {job}, neither in this Redis nor in {storage.url}.")
    raise JobConflict(f"Job {job} has not ended, though Redis has lost it: cancel it first.")


def _delete_objects(storage: Storage, job: str) -> None:
    storage.delete([layout.manifest(job)])
    storage.delete(info.key for info in storage.list(layout.root(job)) if info.key != layout.tombstone(job))
