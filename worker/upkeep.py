"""What a worker does every second beside its work: say that it lives, report progress, and sweep.

Sweeping is for whatever nobody else will do: tickets for tasks that wait although their ticket was lost, and
the stop of jobs that are past their deadline. Every worker sweeps; doing it twice changes nothing. This room
may not know how tasks are run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from pagemill.jobs import tickets
from pagemill.jobs.errors import PagemillError, ProtocolMismatch, RedisUnavailable
from pagemill.jobs.script import connection
from pagemill.jobs.settle import settle_job
from pagemill.jobs.state import State
from pagemill.jobs.status import WorkerInfo
from pagemill.jobs.stopping import stop_job
from pagemill.worker.serving import Serving
from pagemill.worker.tasks import Leasing
from pagemill.worker.workshop import Workshop

log = logging.getLogger("pagemill.worker")

EVERY_S = 1.0
PATIENCE_S = 2.0
LIVES_S = 10.0  # how long a worker that says nothing stays in the registry
RATE_WINDOW_S = 5.0


class Upkeep:
    """Has a connection with little patience of its own: when Redis is away, missing a second is fine."""

    def __init__(self, shop: Workshop, leasing: Leasing, serving: Serving) -> None:
        self._shop, self._leasing, self._serving = shop, leasing, serving
        self._state = State(connection(shop.settings.redis_url), patience_s=PATIENCE_S)
        self._began = time.time()
        self._reported: set[str] = set()
        self._away = False
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._rate: deque[tuple[float, float]] = deque()
        self._hurried = asyncio.Event()

    def hurry(self) -> None:
        """Say what is new now, not when the second is over."""
        self._hurried.set()

    async def run(self) -> None:
        """Until cancelled. Raises ProtocolMismatch alone: everything else may pass."""
        while True:
            try:
                await self.say()
                await self._report()
                await self._sweep()
                if self._away:
                    log.info("Redis is back")
                self._away = False
            except ProtocolMismatch:
                raise
            except PagemillError as error:
                if not self._away:
                    log.warning("%s Work goes on as far as it can.", error)
                self._away = True
            except Exception:
                log.exception("upkeep failed; it is tried again")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurried.wait(), EVERY_S)
            self._hurried.clear()

    def readiness(self) -> tuple[bool, dict[str, str]]:
        """Whether tasks are taken, and what to tell an orchestrator of it. Called from other threads."""
        unfit, phase = self._shop.fitness.message, self._serving.phase
        return phase == "ready" and not unfit and not self._away, {
            "worker": self._shop.settings.worker_id,
            "state": "sick" if unfit and phase == "ready" else phase,
            "message": unfit or self._serving.message,
            "loaded": self._leasing.loaded if phase == "ready" else "",
            "redis": "away" if self._away else "ok",
        }

    async def say(self) -> None:
        """One heartbeat of the registry. One that had not heard of us is new, or has lost its memory."""
        if not await self._state.heartbeat(self._info(), int(LIVES_S * 1000)):
            self._shop.rescue.look()

    async def close(self) -> None:
        """Take the worker out of the registry and its figures out of the jobs."""
        for task in self._settling.values():
            task.cancel()
        try:
            async with asyncio.timeout(1.0):
                for job in self._reported:
                    await self._tell(job, 0, 0.0)
                await self._state.goodbye(self._shop.settings.worker_id)
        except (PagemillError, TimeoutError):
            pass  # both run out by themselves
        await self._state.close()

    def _info(self) -> WorkerInfo:
        health, engine = self._shop.engine.health(), self._leasing.engine
        unfit = self._shop.fitness.message
        figures = health.figures
        total = figures.get("blocks_total", 0.0)
        self._shop.figures.look(
            health.restarts, health.rows_in_flight, health.rows_limit, self._leasing.busy, figures
        )
        return WorkerInfo(
            worker=self._shop.settings.worker_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            state="sick" if unfit and self._serving.phase == "ready" else self._serving.phase,
            message=unfit or self._serving.message,
            models=self._serving.models,
            loaded=self._leasing.loaded,
            fingerprint=engine.fingerprint if engine else "",
            context=engine.context if engine else 0,
            device=engine.device if engine else "",
            dtype=engine.dtype if engine else "",
            version=_version(),
            started_at=self._began,
            shards_running=self._leasing.busy,
            rows_running=health.rows_in_flight,
            kv_used=figures.get("blocks_used", 0.0) / total if total else 0.0,
            tokens_per_second=self._tokens_per_second(figures.get("generated_tokens", 0.0)),
        )

    def _tokens_per_second(self, generated: float) -> float:
        """Over the last seconds; an engine that was started again counts from nothing, and so does this."""
        now = time.monotonic()
        if self._rate and generated < self._rate[-1][1]:
            self._rate.clear()
        self._rate.append((now, generated))
        while len(self._rate) > 2 and self._rate[0][0] < now - RATE_WINDOW_S:
            self._rate.popleft()
        since, before = self._rate[0]
        return round((generated - before) / (now - since), 1) if now > since else 0.0

    async def _report(self) -> None:
        """Live figures of each job that has a task here; the engine's speed is shared out by rows."""
        running = self._shop.rows_running
        rows = sum(running.values())
        speed = self._rate_now()
        jobs = self._leasing.jobs()
        for job in jobs:
            await self._tell(job, running[job], round(speed * running[job] / rows, 1) if rows else 0.0)
        for job in self._reported - jobs:
            await self._tell(job, 0, 0.0)
            running.pop(job, None)
        self._reported = jobs

    def _rate_now(self) -> float:
        if len(self._rate) < 2:
            return 0.0
        (since, before), (now, generated) = self._rate[0], self._rate[-1]
        return (generated - before) / (now - since) if now > since else 0.0

    async def _tell(self, job: str, rows: int, speed: float) -> None:
        try:
            worker = self._shop.settings.worker_id
            await self._state.report(job, worker, rows_running=rows, tokens_per_second=speed)
        except PagemillError as error:  # it ended, or was deleted
            log.debug("no report for %s: %s", job, error)

    async def _sweep(self) -> None:
        for job in await self._state.overdue():
            await self._expire(job)
        for model in self._serving.models:
            waiting = await self._state.runnable(model, tickets.SLOTS)
            if waiting:
                if not self._leasing.full:
                    self._leasing.wake()
                await tickets.send(self._state.redis, model, waiting, patience_s=PATIENCE_S)

    async def _expire(self, job: str) -> None:
        try:
            outcome = await stop_job(self._state, self._shop.storage, job, "expired")
            log.info("%s is past its deadline and is %s", job, outcome.state)
            status = await self._state.status(job)
            workers = await self._state.workers()
            if status is not None and not any(status.model in worker.models for worker in workers):
                self._settling[job] = asyncio.create_task(self._settle(job, status.model))
        except (RedisUnavailable, ProtocolMismatch):
            raise
        except PagemillError as error:  # of this job alone: others are past their deadlines too
            log.warning("%s is past its deadline, but cannot be stopped: %s", job, error)

    async def _settle(self, job: str, model: str) -> None:
        """End a stopped job whose model nobody serves: what is left of it needs no engine.

        Until it has ended: the store or Redis may refuse for a while, and a dead worker may hold its lease.
        """
        try:
            while True:
                try:
                    await settle_job(self._state, self._shop.storage, job, model)
                    status = await self._state.status(job)
                    if status is None or status.terminal:
                        return
                except PagemillError as error:
                    log.warning("%s could not be ended, and is tried again: %s", job, error)
                await asyncio.sleep(EVERY_S)
        finally:
            self._settling.pop(job, None)


def _version() -> str:
    try:
        return version("pagemill")
    except PackageNotFoundError:  # run from a folder of links
        return ""
