"""Does what the schedule says, and says so: each fault in one line with its time.

This room knows servers, proxies and processes. It may not know jobs.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import redis
from faults.fleet import Fleet, Life
from faults.redis_proxy import FaultyRedis
from faults.s3_proxy import (
    Exchange,
    Fault,
    answer,
    cut_body,
    damage_reply,
    damage_request,
    drop_reply,
    drop_request,
    late,
    stuck,
)
from faults.schedule import Fault as Planned
from servers import RedisServer, ServerError

DRIZZLE = 0.01
"""The share of requests to S3 that go wrong even when no fault is under way."""
STORM = 0.3
"""The share while one is, for faults that would otherwise stop everything."""
LOST_REPLIES = 6

Say = Callable[[str], None]


class S3Weather:
    """Which request to S3 goes wrong, and how. Asked by the proxy, for each."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(f"{seed}/s3")
        self._lock = threading.Lock()
        self._now: set[str] = set()
        self._over = False
        self.spoiled = Counter[str]()

    def begin(self, kind: str) -> None:
        with self._lock:
            self._now.add(kind)

    def end(self, kind: str) -> None:
        with self._lock:
            self._now.discard(kind)

    def calm(self) -> None:
        with self._lock:
            self._now.clear()
            self._over = True

    def __call__(self, exchange: Exchange) -> Fault | None:
        with self._lock:
            if self._over:
                return None
            kind, rng = self._kind(), self._rng
            fault = self._fault(kind, exchange, rng.random(), rng.uniform(0.2, 1.5)) if kind else None
            if fault is not None:
                self.spoiled[str(kind)] += 1
            return fault

    def _kind(self) -> str | None:
        for kind in sorted(self._now):
            if kind in ("S3 answers 503", "S3 away", "S3 full", "S3 slow") or self._rng.random() < STORM:
                return kind
        if self._rng.random() < DRIZZLE:
            return self._rng.choice(("S3 answers 503", "S3 away", "S3 loses replies", "S3 cuts bodies",
                                     "S3 damages what is read", "S3 slow"))  # fmt: skip
        return None

    @staticmethod
    def _fault(kind: str, exchange: Exchange, draw: float, seconds: float) -> Fault | None:
        method, listing = exchange.method, "list-type=" in exchange.path
        match kind:
            case "S3 answers 503":
                return answer(503, "SlowDown")
            case "S3 away" | "S3 loses requests":
                return drop_request
            case "S3 full":
                return answer(507, "XMinioStorageFull") if method in ("PUT", "POST") else None
            case "S3 loses replies":
                return drop_reply
            case "S3 cuts bodies":
                return cut_body(int(draw * 400)) if method == "GET" and not listing else None
            # A listing carries no checksum of anybody's: what comes damaged there cannot be found out.
            case "S3 damages what is read":
                return damage_reply(draw) if method == "GET" and not listing else None
            case "S3 damages what is written":
                return damage_request(draw) if method == "PUT" else None
            case "S3 slow":
                return late(seconds)
            case "S3 stuck":
                return stuck(10 * seconds)
        raise ValueError(f"no such fault: {kind}")


class Storm:
    """Runs a schedule against everything there is. `run` blocks; `calm` ends whatever is still under way."""

    def __init__(
        self, fleet: Fleet, server: RedisServer, redis_proxy: FaultyRedis, s3: S3Weather, say: Say
    ) -> None:
        self._fleet, self._server, self._redis, self._s3, self._say = fleet, server, redis_proxy, s3, say
        self._ending: list[tuple[float, Callable[[], None]]] = []
        self.done = Counter[str]()

    def run(self, schedule: list[Planned], began: float) -> None:
        for fault in schedule:
            self._wait(began + fault.at)
            self.done[fault.kind] += 1
            self._say(f"FAULT {fault.kind}" + (f" for {fault.lasts:.1f} s" if fault.lasts else ""))
            self._strike(fault)

    def calm(self) -> None:
        self._s3.calm()
        self._redis.calm()
        for _, end in self._ending:
            end()
        self._ending = []
        self._fleet.thaw_all()
        self._say("calm: no fault from here on")

    def _wait(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            for due, end in [each for each in self._ending if each[0] <= time.monotonic()]:
                end()
                self._ending.remove((due, end))
            time.sleep(min(left, 0.05))

    def _later(self, seconds: float, end: Callable[[], None]) -> None:
        self._ending.append((time.monotonic() + seconds, end))

    def _strike(self, fault: Planned) -> None:
        if fault.kind.startswith("S3 "):
            self._s3.begin(fault.kind)
            self._later(fault.lasts, lambda: self._s3.end(fault.kind))
        elif "Redis" in fault.kind or "scripts" in fault.kind:
            self._strike_redis(fault)
        else:
            self._strike_workers(fault)

    def _strike_workers(self, fault: Planned) -> None:
        alive = self._fleet.alive()
        if not alive:
            self._say("  no worker is there to be struck")
            return
        one = alive[int(fault.draw * len(alive))]
        match fault.kind:
            case "kill -9 of a worker":
                one.process.kill()
            case "kill -9 of all workers":
                for life in alive:
                    life.process.kill()
            case "a worker frozen past its lease":
                self._freeze(one, fault.lasts, engine=False)
            case "a worker and its engine frozen past its lease":
                self._freeze(one, fault.lasts, engine=True)
            case "kill -9 of an engine":
                one.kill_engine()
            case "SIGTERM of a worker":
                one.send(15)
            case "a storm of SIGTERM":
                for life in alive:
                    life.send(15)
            case "a worker without disk":
                one.fill_disk(True)
                self._later(fault.lasts, lambda: one.fill_disk(False))
            case _:
                raise ValueError(f"no such fault: {fault.kind}")
        self._say(
            f"  it strikes {one.log.stem if 'all' not in fault.kind and 'storm' not in fault.kind else 'all'}"
        )

    def _freeze(self, life: Life, seconds: float, *, engine: bool) -> None:
        life.freeze(engine=engine)
        self._later(seconds, life.thaw)

    def _strike_redis(self, fault: Planned) -> None:
        match fault.kind:
            case "Redis killed and started":
                self._server.kill()
                self._pause(fault.lasts)
                self._start()
            case "Redis flushed":
                self._order("FLUSHALL")
            case "Redis without scripts":
                self._order("SCRIPT", "FLUSH")
            case "Redis rolled back by a second":
                before = _sizes(self._server.folder)
                self._pause(fault.lasts)
                self._server.kill()
                self._say(f"  {_cut_back(before)} bytes of its log are gone")
                self._start()
            case "connections to Redis cut":
                self._redis.cut()
            case "replies of scripts lost":
                self._redis.lose_replies(LOST_REPLIES)
            case "Redis slow":
                self._redis.delay(0.15)
                self._later(fault.lasts, lambda: self._redis.delay(0.0))
            case "Redis deaf":
                self._redis.deaf(True)
                self._later(fault.lasts, lambda: self._redis.deaf(False))
            case _:
                raise ValueError(f"no such fault: {fault.kind}")

    def _pause(self, seconds: float) -> None:
        self._wait(time.monotonic() + seconds)

    def _start(self) -> None:
        """Its port may be held for a moment by what the machine does."""
        for _ in range(20):
            with suppress(ServerError):
                self._server.start()
                return
            time.sleep(0.2)
        raise ServerError("Redis does not start again")

    def _order(self, *words: str) -> None:
        with redis.Redis.from_url(self._server.url) as client:
            client.execute_command(*words)


def _sizes(folder: Path) -> dict[Path, int]:
    """Of the append-only files: what a replica would have, that is told no more from here on."""
    return {path: path.stat().st_size for path in folder.glob("appendonlydir/*.aof")}


def _cut_back(before: dict[Path, int]) -> int:
    gone = 0
    for path, size in before.items():
        try:
            gone += path.stat().st_size - size
            with path.open("r+b") as file:
                file.truncate(size)
        except OSError as error:  # rewritten meanwhile
            if error.errno != errno.ENOENT:
                raise
    return gone
