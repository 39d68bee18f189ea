"""What every task of one worker shares: the state, the store, the engine, the heartbeat, and patience.

Storage that refuses is nobody's failure: whoever works here tries again until it answers, says in the job
what is wrong, and goes on by itself. This room may not know what any task does with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from pagemill.jobs import layout
from pagemill.jobs.errors import ObjectNotFound, PagemillError, PreconditionFailed, StorageError
from pagemill.jobs.spec import JobSpec
from pagemill.jobs.state import State
from pagemill.jobs.storage import Storage, decide, read_json
from pagemill.worker.engine_host import EngineHost
from pagemill.worker.fitness import Fitness
from pagemill.worker.lease import Guard, Heartbeat, Released
from pagemill.worker.metrics import Figures
from pagemill.worker.rescue import Rescue
from pagemill.worker.settings import WorkerSettings

log = logging.getLogger("pagemill.worker")

T = TypeVar("T")
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 15.0
TELL_AFTER = 3  # refusals before the job says so: a single 503 is weather
REMEMBERED_JOBS = 16


class Workshop:
    """Handed to every task. `engine` may still be loading; only shards need it."""

    def __init__(
        self,
        settings: WorkerSettings,
        state: State,
        storage: Storage,
        engine: EngineHost,
        heartbeat: Heartbeat,
        figures: Figures,
    ) -> None:
        self.settings, self.state, self.storage = settings, state, storage
        self.engine = engine  # another one after each change of models (serving.py)
        self.heartbeat, self.figures = heartbeat, figures
        self.rows_running: Counter[str] = Counter()  # by job
        self._specs: OrderedDict[str, JobSpec] = OrderedDict()
        self._plans: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._weights: OrderedDict[str, str] = OrderedDict()
        self.fitness = Fitness(storage.check)
        names = [choice.name for choice in settings.choices]
        self.rescue = Rescue(state, storage, names, settings.rescue_seconds)

    async def insist(self, guard: Guard, call: Callable[[], T]) -> T:
        """The result of a blocking storage call, in a thread, tried again while the store refuses.

        Raises Released once the lease is lost or the worker leaves; what is under way then ends by itself,
        and writes nothing that counts. What is missing or exists already is an answer, not trouble, and is
        raised; so is Unfit, when it is this machine's disk that stays full.
        """
        pause, refusals = FIRST_PAUSE_S, 0
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            guard.check()
            try:
                result = await self._unless_released(guard, call)
            except (ObjectNotFound, PreconditionFailed):
                raise
            except StorageError as error:
                refusals += 1
                log.warning("storage, try %d for %s: %s", refusals, guard.lease.job, error)
                self.figures.storage_refusals.inc()
                self.fitness.weigh(error, clock() - began)
                if refusals == TELL_AFTER or (refusals == 1 and not error.transient):
                    await self.tell(guard.lease.job, f"The store refuses: {error}")
                await self._pause(guard, pause)
                pause = min(pause * 2, LONGEST_PAUSE_S)
            else:
                if refusals:
                    await self.tell(guard.lease.job, "")
                return result

    async def _unless_released(self, guard: Guard, call: Callable[[], T]) -> T:
        """A leaving worker lets the call that runs end; a lost lease waits for nothing."""
        working = asyncio.ensure_future(asyncio.to_thread(call))
        while not working.done():
            lost = asyncio.create_task(guard.gone.wait())
            try:
                await asyncio.wait({working, lost}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                lost.cancel()
            if guard.lost and not working.done():
                working.add_done_callback(_seen)
                raise Released
        return working.result()

    async def _pause(self, guard: Guard, seconds: float) -> None:
        ending = asyncio.get_running_loop().time() + seconds
        while (left := ending - asyncio.get_running_loop().time()) > 0:
            guard.check()
            await asyncio.sleep(min(left, 0.25))

    async def tell(self, job: str, reason: str) -> None:
        """Say in the job why it does not move, or that it does ("")."""
        try:
            await (self.state.block(job, reason) if reason else self.state.unblock(job))
        except PagemillError as error:  # it ended in the meantime, or Redis forgot it
            log.debug("%s could not be told: %s", job, error)

    async def spec(self, guard: Guard) -> JobSpec:
        """The job's document. A store without it is another store than the client's."""
        job = guard.lease.job
        if job not in self._specs:
            try:
                data = await self.insist(guard, lambda: self.storage.get(layout.job(job)))
            except ObjectNotFound:
                raise ObjectNotFound(
                    f"{self.storage.url} holds no job {job}: worker and client must name the same store."
                ) from None
            _remember(self._specs, job, JobSpec.load(data))
        return self._specs[job]

    async def weights(self, guard: Guard) -> str:
        """The fingerprint of the weights that the job's rows run on; those of its first lease, ever."""
        job, ours = guard.lease.job, guard.lease.fingerprint
        if job not in self._weights:
            decision = {"job": job, "fingerprint": ours}
            found, _ = await self.insist(guard, lambda: decide(self.storage, layout.model(job), decision))
            _remember(self._weights, job, str(found["fingerprint"]))
        return self._weights[job]

    async def plan(self, guard: Guard) -> dict[str, Any]:
        """The plan that counts; it never changes once it is there."""
        job = guard.lease.job
        if job not in self._plans:
            plan = await self.insist(guard, lambda: read_json(self.storage, layout.plan(job)))
            if plan is None:
                raise ObjectNotFound(f"{self.storage.url} holds no plan of job {job}.")
            _remember(self._plans, job, plan)
        return self._plans[job]


def _seen(done: asyncio.Future[Any]) -> None:
    """Of a call that nobody waits for any more: its failure is no news."""
    if not done.cancelled():
        done.exception()


def _remember(cache: OrderedDict[str, Any], job: str, value: Any) -> None:
    cache[job] = value
    while len(cache) > REMEMBERED_JOBS:
        cache.popitem(last=False)


__all__ = ["Released", "Workshop"]
