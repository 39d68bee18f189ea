"""Which unfinished jobs Redis has lost, found without looking through all that ever ran.

`unfinished/<model>/<job>` is put before job.json and deleted after manifest.json, so that a listing of one
prefix names every job that may be missing. A hint alone means nothing: Redis and the job's objects say what
is so. This room may not know how a job is rebuilt.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from pagemill.jobs import layout
from pagemill.jobs.state import State
from pagemill.jobs.status import TERMINAL
from pagemill.jobs.storage import Storage

STALE_S: Final = 86_400
"""A hint whose job.json has not followed by then never meant a job."""


async def forgotten(state: State, storage: Storage, model: str) -> list[str]:
    """Unfinished jobs of a model that Redis does not know. Stale hints are taken away on the way."""
    hints = await asyncio.to_thread(lambda: list(storage.list(layout.hints(model))))
    jobs = {info.key.rpartition("/")[2]: info for info in hints}
    known = await state.states(jobs)
    lost, stale = list[str](), list[str]()
    for job, info in jobs.items():
        if job not in known:
            fate = await asyncio.to_thread(_fate, storage, job, info.modified)
            lost += [job] if fate == "unfinished" else []
            stale += [info.key] if fate == "over" else []
        elif known[job] in TERMINAL:
            stale.append(info.key)
    if stale:
        await asyncio.to_thread(storage.delete, stale)
    return lost


def _fate(storage: Storage, job: str, hinted_at: float) -> str:
    """unfinished, over, or pending: its submission may yet be completed."""
    if any(storage.head(key) is not None for key in (layout.manifest(job), layout.tombstone(job))):
        return "over"
    if storage.head(layout.job(job)) is not None:
        return "unfinished"
    return "over" if hinted_at < time.time() - STALE_S else "pending"
