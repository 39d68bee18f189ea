"""arq's part: tickets come in, the leasing loop wakes up. Nothing else rides on it.

arq 0.28 has faults that would cost jobs (claims that are never renewed, timeouts without a retry, payloads
that expire after a day, five tries, a worker that dies with Redis away for 1.5 s). A ticket holds no work and
its function returns at once, so each of them costs a second at most: that is how often the loop looks by
itself. The settings below are for the rest. This room may not know what the loop does when it wakes.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any, Protocol

from arq.connections import ArqRedis
from arq.worker import Worker, func
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, RedisError, TimeoutError

from pagemill.jobs import tickets

log = logging.getLogger("pagemill.worker")

POLL_S = 0.1  # arq's own half second is most of a small job's latency
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


class Woken(Protocol):
    """What tickets are for."""

    @property
    def full(self) -> bool: ...
    def wake(self) -> None: ...


class Ticketing:
    """An arq worker that is started again whenever it dies of Redis being away."""

    def __init__(self, redis_url: str, model: str, woken: Woken) -> None:
        self._url, self._model, self._woken = redis_url, model, woken
        self._worker: Worker | None = None

    async def run(self) -> None:
        """Until cancelled."""
        pause = FIRST_PAUSE_S
        while True:
            started = asyncio.get_running_loop().time()
            try:
                self._worker = self._new_worker()
                await self._worker.async_run()
            except (RedisError, OSError) as error:
                log.debug("tickets: %s", error)
            except Exception:
                log.exception("tickets failed; they are taken up again")
            await self._drop_worker()
            lived = asyncio.get_running_loop().time() - started
            pause = FIRST_PAUSE_S if lived > LONGEST_PAUSE_S else min(pause * 2, LONGEST_PAUSE_S)
            await asyncio.sleep(pause)

    async def close(self) -> None:
        await self._drop_worker()

    def _new_worker(self) -> Worker:
        worker = _Worker(
            [func(self._take, name=tickets.FUNCTION, timeout=5, max_tries=2**31)],
            queue_name=tickets.queue_name(self._model),
            redis_pool=_pool(self._url),
            handle_signals=False,
            max_jobs=4,
            job_timeout=5,
            keep_result=0,
            poll_delay=POLL_S,
            max_tries=2**31,
            health_check_interval=3600,
            # The default key is shared by all workers of a queue, and deleted by each that ends.
            health_check_key=f"{tickets.queue_name(self._model)}:health:{id(self)}",
            job_serializer=tickets.serialize,
            job_deserializer=tickets.deserialize,
            log_results=False,
        )
        worker.woken = self._woken
        return worker

    async def _take(self, _ctx: dict[Any, Any]) -> None:
        self._woken.wake()

    async def _drop_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.handle_sig(signal.SIGUSR1)  # cancels what runs; no signal is sent
        await asyncio.gather(*worker.tasks.values(), return_exceptions=True)
        await worker.pool.aclose(close_connection_pool=True)


class _Worker(Worker):  # type: ignore[misc]
    """Leaves tickets to others while its own slots are full."""

    woken: Woken

    async def _poll_iteration(self) -> None:
        self.allow_pick_jobs = not self.woken.full
        await super()._poll_iteration()


def _pool(url: str) -> ArqRedis:
    pool: ArqRedis = ArqRedis.from_url(
        url,
        retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), 5),
        retry_on_error=[ConnectionError, TimeoutError, BusyLoadingError, OSError],
        socket_timeout=10.0,
        socket_connect_timeout=5.0,
    )
    pool.job_serializer = tickets.serialize
    pool.job_deserializer = tickets.deserialize
    return pool
