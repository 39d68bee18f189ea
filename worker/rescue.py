"""Brings jobs back that Redis has lost: whenever it shows that it forgot, and now and then in any case.

    a lease, seal or commit of a job it does not know   that job, once our task of it has put away its rows
    a registry that does not know us                    it is new, or it was flushed: all jobs of our models
    a minute gone by                                    the same; a failover forgets, and tells nobody

Any number of workers may do so at once: the epoch that each claims is its own, and one `create` succeeds.
What the store refuses is tried again. This room may not know tasks, nor engines.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Sequence

from pagemill.jobs.errors import JobConflict, JobNotFound, PagemillError
from pagemill.jobs.forgotten import forgotten
from pagemill.jobs.recover import restore
from pagemill.jobs.state import State
from pagemill.jobs.storage import Storage

log = logging.getLogger("pagemill.worker")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Rescue:
    """Told by others what to look for; `run` does it, one job after the other."""

    def __init__(self, state: State, storage: Storage, models: Sequence[str], every_s: float) -> None:
        self._state, self._storage, self._models, self._every_s = state, storage, models, every_s
        self._jobs: set[str] = set()
        self._all = False
        self._asked = asyncio.Event()

    def job(self, job: str) -> None:
        """Redis does not know this job, which has no task here any more."""
        self._jobs.add(job)
        self._asked.set()

    def look(self) -> None:
        """Redis may have lost everything."""
        self._all = True
        self._asked.set()

    async def run(self, held: Callable[[], Collection[str]], found: Callable[[], None]) -> None:
        """Until cancelled. held: jobs with a task here, which report themselves when that has put away what
        it has finished. found: called when there may be work again."""
        pause = FIRST_PAUSE_S
        while True:
            try:
                await asyncio.wait_for(self._asked.wait(), self._every_s * random.uniform(0.75, 1.25))
            except TimeoutError:
                self._all = True
            self._asked.clear()
            await self._find(held)
            await self._restore(found)
            if not self._jobs and not self._all:
                pause = FIRST_PAUSE_S
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            self._asked.set()

    async def _find(self, held: Callable[[], Collection[str]]) -> None:
        if not self._all:
            return
        self._all = False
        try:
            lost = [
                job for model in self._models for job in await forgotten(self._state, self._storage, model)
            ]
        except PagemillError as error:
            log.warning("jobs that Redis may have lost are not looked for: %s", error)
            self._all = True
        else:
            self._jobs.update(job for job in lost if job not in held())

    async def _restore(self, found: Callable[[], None]) -> None:
        # Whoever else noticed does the same; not all of us need to begin with the same job.
        for job in random.sample(sorted(self._jobs), len(self._jobs)):
            try:
                restored = await restore(self._state, self._storage, job)
            except (JobNotFound, JobConflict) as error:  # it was deleted, or never submitted to its end
                log.info("%s does not come back: %s", job, error)
            except PagemillError as error:
                log.warning("%s is not back yet: %s", job, error)
                continue
            else:
                if restored.rebuilt:
                    log.warning("Redis had lost %s: rebuilt from its objects, %s", job, restored.state)
                    found()
            self._jobs.discard(job)
