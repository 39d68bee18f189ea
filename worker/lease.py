"""Keeps leases alive from a thread of its own, and learns there that work has to stop.

Parsing, compression and a stuck disk must not cost a lease, so renewals share nothing with the work: an own
thread, event loop and Redis connection. One round trip a second renews every lease and brings back whether
its job was stopped and whether the lease is still ours. This room may not know what the work is.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from pagemill.jobs.errors import PagemillError
from pagemill.jobs.script import connection
from pagemill.jobs.state import State
from pagemill.jobs.status import Lease, Renewal, StopReason
from pagemill.worker.logs import about

log = logging.getLogger("pagemill.worker")

RENEW_S = 1.0  # a cancel is to take effect in about a second
PATIENCE_S = 5.0  # of one renewal; the next one tries again anyway


class Released(Exception):
    """Raised inside work whose worker is leaving or whose lease is gone: stop, and publish nothing more."""


class Guard:
    """One held lease, as the work sees it. Safe to read from any thread.

    stop: why the job drains, None while it runs. lost: somebody else has the task, or nobody needs it.
    forgotten: lost because Redis does not know the job any more.
    leaving: the worker goes away; finished rows are still to be sealed.
    winding_up: the engine is to serve another model. Rows under way are finished, no other is begun.
    changed: set, in the worker's event loop, whenever one of them changes. gone: set once it is lost.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.stop: StopReason | None = lease.stop
        self.lost = self.forgotten = False
        self.leaving = self.winding_up = False
        self.changed = asyncio.Event()
        self.gone = asyncio.Event()

    @property
    def key(self) -> tuple[str, str, str]:
        return self.lease.job, self.lease.task, self.lease.fence

    def check(self) -> str | None:
        """Why the job drains, or None. Raises Released when the work has no purpose any more."""
        if self.lost or self.leaving:
            raise Released
        return self.stop

    def lose(self) -> None:
        self.lost = True
        self.gone.set()
        self.changed.set()

    def leave(self) -> None:
        self.leaving = True
        self.changed.set()

    def wind_up(self) -> None:
        self.winding_up = True
        self.changed.set()


class Heartbeat:
    """Renews whatever is held. Used from one event loop; its own runs in its thread."""

    def __init__(self, redis_url: str, worker: str, ttl_s: float) -> None:
        self._url, self._worker, self._ttl_ms = redis_url, worker, int(ttl_s * 1000)
        self._interval_s = min(RENEW_S, ttl_s / 3)
        self._held: dict[tuple[str, str, str], Guard] = {}
        self._thread: threading.Thread | None = None
        self._closing: Callable[[], object] | None = None

    def start(self) -> None:
        self._home = asyncio.get_running_loop()
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._beat(started)), daemon=True, name="heartbeat"
        )
        self._thread.start()
        started.wait()

    async def close(self) -> None:
        if self._thread is not None and self._closing is not None:
            self._closing()
            await asyncio.to_thread(self._thread.join, 2.0)

    def hold(self, lease: Lease) -> Guard:
        """Renew this lease from now on, until it is dropped or lost."""
        guard = Guard(lease)
        self._held[guard.key] = guard
        return guard

    def drop(self, guard: Guard) -> None:
        self._held.pop(guard.key, None)

    async def _beat(self, started: threading.Event) -> None:
        loop, closing = asyncio.get_running_loop(), asyncio.Event()
        self._closing = lambda: loop.call_soon_threadsafe(closing.set)
        started.set()
        state = State(connection(self._url), patience_s=PATIENCE_S)
        try:
            ending = asyncio.create_task(closing.wait())
            while not ending.done():
                renewing = asyncio.create_task(self._renew(state))
                await asyncio.wait({renewing, ending}, return_when=asyncio.FIRST_COMPLETED)
                renewing.cancel()
                await asyncio.wait({ending}, timeout=self._interval_s)
        finally:
            await state.close()

    async def _renew(self, state: State) -> None:
        guards = list(self._held.values())
        if not guards:
            return
        try:
            renewals = await state.renew(self._worker, [guard.key for guard in guards], self._ttl_ms)
        except (PagemillError, OSError) as error:
            # Not lost: what ran out but was not taken is ours again at the next success, and the fence
            # decides.
            log.warning("leases could not be renewed: %s", error)
            return
        except Exception:
            log.exception("leases could not be renewed")
            return
        for guard, renewal in zip(guards, renewals, strict=True):
            self._home.call_soon_threadsafe(self._learn, guard, renewal)

    def _learn(self, guard: Guard, renewal: Renewal) -> None:
        if self._held.get(guard.key) is not guard:
            return  # ended in the meantime, so of course nobody holds it
        if not renewal.ok:
            self.drop(guard)
            guard.forgotten = renewal.state == ""
            why = ", which Redis has forgotten" if guard.forgotten else ""
            with about(job=guard.lease.job, task=guard.lease.task, shard=guard.lease.shard):
                log.warning("lost the lease of %s of %s%s", guard.lease.task, guard.lease.job, why)
            guard.lose()
        elif renewal.stop is not None and guard.stop is None:
            guard.stop = renewal.stop
            guard.changed.set()
