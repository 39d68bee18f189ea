"""The leasing loop: which tasks this worker runs, and what becomes of one that fails.

Whatever wakes it (a ticket, a task that ended, a second gone by), it asks for the best runnable task while a
slot is free. When all are taken it still asks for jobs that nobody works on, and runs one of those in an
extra slot: a small job starts at once behind a huge one. Of models that it may load but has not, it takes
what needs no engine, in slots of their own. A task that raises gives its lease back, and this worker leaves
its job alone for a while, so that jobs behind it have their turn; after some times it says in the job what
is wrong. Nothing is ever stuck, and nothing silent. This room may not know what arq is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pagemill.jobs import layout, tickets
from pagemill.jobs.deletion import forget_deleted
from pagemill.jobs.errors import (
    DiskFull,
    JobConflict,
    JobNotFound,
    PagemillError,
    RedisUnavailable,
    StorageError,
)
from pagemill.jobs.failures import one_line
from pagemill.jobs.settle import settle
from pagemill.jobs.state import LeaseLost, new_nonce
from pagemill.jobs.status import KINDS, Lease
from pagemill.jobs.storage import Storage, read_json
from pagemill.worker.aside import Aside
from pagemill.worker.engine_host import EngineInfo
from pagemill.worker.isolation import has_killed, needs_isolation
from pagemill.worker.lease import Guard, Released
from pagemill.worker.logs import about
from pagemill.worker.shard import run_shard
from pagemill.worker.workshop import Workshop

log = logging.getLogger("pagemill.worker")

TICK_S = 1.0
TELL_AFTER = 3
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0

Outcome = Literal["done", "lost", "handed back", "moot", "failed"]
# A shard of usual rows has some 230. While one is read or committed, another computes.
LEAST_SLOTS, MOST_SLOTS, ROWS_A_SLOT = 2, 64, 128
SIDE_SLOTS = 2  # for plans and endings of jobs whose model is not loaded


@dataclass(slots=True, eq=False)
class _Slot:
    """extra: beyond the ordinary ones, for a starved job. side: of a model that is not loaded."""

    guard: Guard
    extra: bool
    side: bool
    isolated: bool

    @property
    def lease(self) -> Lease:
        return self.guard.lease

    @property
    def computes(self) -> bool:
        return self.lease.kind == "shard" and self.lease.stop is None


class Leasing:
    """Runs tasks until told to leave. loaded: the model whose turn it is; engine: set while it is there."""

    def __init__(self, shop: Workshop, models: Sequence[str]) -> None:
        self._shop, self._models = shop, models
        self.loaded = models[0]
        self._tasks: dict[asyncio.Task[None], _Slot] = {}
        self._wake = asyncio.Event()
        self._filling = asyncio.Lock()
        self._leaving = False
        self._failures: Counter[tuple[str, str]] = Counter()
        self._avoided: dict[str, float] = {}  # jobs that failed here, and until when they are left alone
        self.engine: EngineInfo | None = None

    @property
    def busy(self) -> int:
        return len(self._tasks)

    @property
    def computing(self) -> int:
        """Shards that are in the engine."""
        return sum(slot.computes for slot in self._tasks.values())

    @property
    def full(self) -> bool:
        """Whether a ticket would be wasted on this worker."""
        return self._leaving or self._ordinary() >= self.slots or self._isolating()

    @property
    def slots(self) -> int:
        """Shards at once, beside one for starved jobs."""
        rows = self.engine.rows if self.engine is not None else 0
        return self._shop.settings.slots or max(LEAST_SLOTS, min(MOST_SLOTS, rows // ROWS_A_SLOT))

    def wake(self) -> None:
        self._wake.set()

    def jobs(self) -> set[str]:
        """Those with a task here now."""
        return {slot.lease.job for slot in self._tasks.values()}

    async def run(self) -> None:
        """Lease and run, until `leave`."""
        while not self._leaving:
            self._wake.clear()
            try:
                async with self._filling:
                    await self._fill()
            except PagemillError as error:  # Redis refuses, or speaks another protocol: it may be mended
                log.error("cannot lease: %s", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_S)

    async def leave(self, patience_s: float) -> None:
        """Seal what is finished, hand every task back, and return within about `patience_s`."""
        self._leaving = True
        self.wake()
        for slot in self._tasks.values():
            slot.guard.leave()
        with suppress(TimeoutError):  # a lease that is being asked for; what never arrives here runs out
            async with asyncio.timeout(1.0), self._filling:
                pass
        if not self._tasks:
            return
        _, late = await asyncio.wait(list(self._tasks), timeout=patience_s)
        slots = [self._tasks[task] for task in late if task in self._tasks]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=0.5)
            await asyncio.gather(*(self._hand_back(slot.guard) for slot in slots))

    async def wind_up(self) -> None:
        """Take nothing more for the engine; returns when nothing here needs it: rows under way end first."""
        self.engine = None
        with suppress(RedisUnavailable):
            async with self._filling:
                pass  # a lease that is being asked for
        while computing := [task for task, slot in self._tasks.items() if slot.computes]:
            for task in computing:
                self._tasks[task].guard.wind_up()
            await asyncio.wait(computing)

    def _ordinary(self) -> int:
        return sum(not (slot.extra or slot.side) for slot in self._tasks.values())

    def _isolating(self) -> bool:
        return any(slot.isolated for slot in self._tasks.values())

    async def _fill(self) -> None:
        """Lease until no slot is free or nothing is runnable. Nothing goes beside a shard in isolation."""
        while not self._leaving and not self._isolating() and await self._shop.fitness.fit():
            if not await self._fill_ordinary() and not await self._fill_side():
                return

    async def _fill_ordinary(self) -> bool:
        """One more task of the loaded model, if there is a slot for one."""
        starved_only = self._ordinary() >= self.slots
        if starved_only and any(slot.extra for slot in self._tasks.values()):
            return False
        lease = await self._lease(self.loaded, starved_only)
        if lease is not None:
            self._begin(lease, extra=starved_only)
        return lease is not None

    async def _fill_side(self) -> bool:
        """One more task of another model; without its weights these are tasks that need no engine."""
        busy = sum(slot.side for slot in self._tasks.values())
        for model in self._models if busy < SIDE_SLOTS else ():
            if model != self.loaded and (lease := await self._lease(model, busy > 0)) is not None:
                self._begin(lease, side=True)
                return True
        return False

    async def _lease(self, model: str, starved_only: bool) -> Lease | None:
        engine = self.engine if model == self.loaded else None
        return await self._shop.state.lease(
            model,
            worker=self._shop.settings.worker_id,
            nonce=new_nonce(),
            ttl_ms=int(self._shop.settings.lease_ttl_s * 1000),
            fingerprint=engine.fingerprint if engine else None,
            context=engine.context if engine else None,
            kinds=KINDS,
            starved_only=starved_only,
            avoid=self._avoiding(),
        )

    def _avoiding(self) -> list[str]:
        now = asyncio.get_running_loop().time()
        self._avoided = {job: until for job, until in self._avoided.items() if until > now}
        return list(self._avoided)

    def _begin(self, lease: Lease, *, extra: bool = False, side: bool = False) -> None:
        with about(job=lease.job, task=lease.task, shard=lease.shard):
            log.info("%s of %s leased (attempt %d)", lease.task, lease.job, lease.attempt)
        self._shop.figures.leases.labels(lease.kind).inc()
        slot = _Slot(self._shop.heartbeat.hold(lease), extra, side, needs_isolation(lease))
        if self._leaving:
            slot.guard.leave()
        task = asyncio.create_task(self._run(slot), name=f"{lease.task} of {lease.job}")
        self._tasks[task] = slot
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self.wake()

    async def _run(self, slot: _Slot) -> None:
        lease = slot.lease
        with about(job=lease.job, task=lease.task, shard=lease.shard):
            outcome, pause = await self._outcome(slot)
            self._shop.figures.tasks.labels(lease.kind, outcome).inc()
            log.info("%s of %s: %s", lease.task, lease.job, outcome)
        if pause and not self._leaving:
            # This worker leaves the job alone, not others: one of them may well run what it cannot. The slot
            # waits a little too, or a store that refuses everything would be asked for one job after another.
            self._avoided[lease.job] = asyncio.get_running_loop().time() + pause
            await asyncio.sleep(min(pause, FIRST_PAUSE_S))

    async def _outcome(self, slot: _Slot) -> tuple[Outcome, float]:
        """Run the task. Whatever it raises ends here: how it ended, and how long its job is left alone."""
        guard, lease = slot.guard, slot.lease
        try:
            await self._do(slot)
        except (Released, LeaseLost):
            if guard.leaving and not guard.lost:
                await self._hand_back(guard)
                return "handed back", 0.0
            if guard.forgotten:
                self._shop.rescue.job(lease.job)
            return "lost", 0.0
        except (JobNotFound, JobConflict) as error:
            log.info("%s of %s is not wanted any more: %s", lease.task, lease.job, error)
            if isinstance(error, JobNotFound):
                self._shop.rescue.job(lease.job)
            return "moot", 0.0
        except Exception as error:
            if isinstance(error, StorageError) and await self._deleted(guard):
                return "moot", 0.0
            return "failed", await self._failed(guard, error)
        finally:
            self._shop.heartbeat.drop(guard)
        self._failures.pop((lease.job, lease.task), None)
        return "done", 0.0

    async def _do(self, slot: _Slot) -> None:
        guard, lease = slot.guard, slot.lease
        if slot.isolated:
            await self._until_alone(slot)
        if lease.kind == "shard" and lease.stop is None:
            await run_shard(self._shop, guard, urgent=slot.extra, isolated=slot.isolated)
        else:
            await self._settle(guard)

    async def _until_alone(self, slot: _Slot) -> None:
        """Nobody else's rows may die with this shard's, nor be taken for what killed them."""
        log.warning("%s of %s has lost its workers: it runs alone", slot.lease.task, slot.lease.job)
        changed = asyncio.create_task(slot.guard.changed.wait())
        try:
            while others := [task for task, other in self._tasks.items() if other is not slot]:
                slot.guard.check()
                await asyncio.wait([changed, *others], timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()

    async def _settle(self, guard: Guard) -> None:
        """Plan, finalize, or a shard of a stopped job: what needs no engine. Ends when the lease is lost."""
        shop = self._shop

        def stopped() -> str | None:
            return guard.check() or stop_reason(shop.storage, guard.lease.job)

        aside = Aside(shop, guard) if has_killed(guard.lease) else None
        settling = asyncio.create_task(
            settle(shop.state, shop.storage, guard.lease, stopped_check=stopped, elsewhere=aside),
            name="settle",
        )
        lost = asyncio.create_task(guard.gone.wait())
        try:
            await asyncio.wait({settling, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not settling.done():
                raise Released
            settling.result()
        finally:
            lost.cancel()
            settling.cancel()

    async def _failed(self, guard: Guard, error: Exception) -> float:
        """Give the task back, say so where people look, and tell how long to leave its job alone."""
        lease = guard.lease
        key = (lease.job, lease.task)
        self._failures[key] += 1
        times = self._failures[key]
        if isinstance(error, PagemillError):
            log.error("%s of %s failed (%d): %s", lease.task, lease.job, times, error)
        else:
            log.error("%s of %s failed (%d)", lease.task, lease.job, times, exc_info=error)
        if isinstance(error, DiskFull):
            self._shop.fitness.doubt(error)
        await self._hand_back(guard)
        weather = isinstance(error, StorageError) and error.transient
        if times >= TELL_AFTER or (isinstance(error, PagemillError) and not weather):
            what = f"{type(error).__name__}: {error}" if not isinstance(error, PagemillError) else str(error)
            worker = self._shop.settings.worker_id
            await self._shop.tell(
                lease.job, one_line(f"{lease.task} failed {times} times on {worker}: {what}")
            )
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(times - 1, 10))

    async def _deleted(self, guard: Guard) -> bool:
        """Whether the job's objects are gone because it was deleted, which this Redis has forgotten."""
        try:
            deleted = await forget_deleted(self._shop.state, self._shop.storage, guard.lease.job)
        except StorageError:
            return False
        if deleted:
            log.warning("%s was deleted, and Redis had forgotten that", guard.lease.job)
        return deleted

    async def _hand_back(self, guard: Guard) -> None:
        self._shop.heartbeat.drop(guard)
        lease = guard.lease
        try:
            async with asyncio.timeout(1.0 if self._leaving else 30.0):
                await self._shop.state.release(lease.job, lease.task, lease.fence)
                if self._leaving:  # an idle worker would look by itself, but only once a second
                    await tickets.send(self._shop.state.redis, self.loaded, 1, patience_s=0.5)
        except (TimeoutError, RedisUnavailable):
            log.warning("%s of %s could not be handed back; its lease runs out", lease.task, lease.job)


def stop_reason(storage: Storage, job: str) -> str | None:
    """Why the job was stopped, as the store says, whatever Redis knows. Blocks."""
    stop = read_json(storage, layout.stop(job))
    return None if stop is None else str(stop["reason"])
