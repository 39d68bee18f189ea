"""What can be asked of the state without changing it: jobs, workers, events, and Redis itself.

The public way to poll is `HGETALL pagemill:{<job>}`, and needs none of this. This room may not change a job's
keys, and may not know the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from pagemill.jobs.errors import ProtocolMismatch
from pagemill.jobs.script import SOCKET_TIMEOUT_S, Scripts, connection, decoded, pairs
from pagemill.jobs.spec import PROTOCOL
from pagemill.jobs.status import Event, JobStatus, ServerFacts, Want, WorkerInfo

PREFIX = "pagemill"
FRESH_MS = 10_000
"""Live figures that are older count no more. Workers report every second."""


class Observer:
    """Reads the state. `prefix` begins every key, so that several installations may share one Redis.

    patience_s: how long a call waits for a Redis that is away before it raises RedisUnavailable.
    """

    def __init__(self, redis: Redis, *, prefix: str = PREFIX, patience_s: float = 5.0) -> None:
        self.redis = redis
        self.prefix = prefix
        self.scripts = Scripts(redis, patience_s)

    @classmethod
    async def connect(cls, url: str, *, prefix: str = PREFIX, patience_s: float = 5.0) -> Self:
        """A state whose Redis has answered. Raises RedisUnavailable when none does, or the URL is none."""
        opened = cls(connection(url), prefix=prefix, patience_s=patience_s)
        try:
            await opened.check()
        except BaseException:
            await opened.close()
            raise
        return opened

    async def close(self) -> None:
        await self.redis.aclose()

    def key(self, job: str) -> str:
        return f"{self.prefix}:{{{job}}}"

    async def check(self) -> None:
        """Raises RedisUnavailable unless Redis answers within the patience."""
        await self.scripts.patiently(lambda: _reply(self.redis.ping()))

    async def check_protocol(self) -> None:
        """Claims a fresh Redis for our version. Raises ProtocolMismatch when it holds another one's state."""
        name = f"{self.prefix}:protocol"
        theirs = None
        while theirs is None:  # a server that is flushed between the two has said nothing
            await self.scripts.patiently(lambda: _reply(self.redis.set(name, PROTOCOL, nx=True)))
            theirs = decoded(await self.scripts.patiently(lambda: _reply(self.redis.get(name))))
        if theirs != str(PROTOCOL):
            raise protocol_mismatch(theirs)

    async def facts(self) -> ServerFacts:
        """What the doctor judges Redis by."""
        server = decoded(await self.scripts.patiently(lambda: _reply(self.redis.info("server"))))
        persistence = decoded(await self.scripts.patiently(lambda: _reply(self.redis.info("persistence"))))
        memory = decoded(await self.scripts.patiently(lambda: _reply(self.redis.info("memory"))))
        protocol = decoded(
            await self.scripts.patiently(lambda: _reply(self.redis.get(f"{self.prefix}:protocol")))
        )
        return ServerFacts(
            version=str(server.get("valkey_version") or server["redis_version"]),
            maxmemory_policy=str(memory.get("maxmemory_policy", "")),
            persistent=bool(int(persistence.get("aof_enabled", 0))) or await self._saves(),
            uptime_seconds=int(server["uptime_in_seconds"]),
            protocol=int(protocol) if protocol else None,
        )

    async def _saves(self) -> bool:
        try:
            config = decoded(await self.scripts.patiently(lambda: _reply(self.redis.config_get("save"))))
        except ResponseError:  # hosted servers hide CONFIG; they also persist by contract
            return True
        return bool(config.get("save"))

    async def status(self, job: str) -> JobStatus | None:
        """None for a job that Redis does not know: never created, kept past its retention, or lost."""
        values = pairs(await self.scripts.call("status", self.key(job), self.prefix, FRESH_MS))
        return JobStatus.from_hash(job, values) if values else None

    async def states(self, jobs: Iterable[str]) -> dict[str, str]:
        """The states of those of these jobs that Redis knows."""
        names = list(jobs)
        replies = await self.scripts.call_many(
            "status", [(self.key(name), (self.prefix, FRESH_MS)) for name in names]
        )
        return {name: pairs(flat)["state"] for name, flat in zip(names, replies, strict=True) if flat}

    async def list_jobs(
        self, limit: int = 50, offset: int = 0, *, state: str | None = None, model: str | None = None
    ) -> list[JobStatus]:
        """The newest jobs first, of one state or model where given; `offset` skips that many of those.

        Ids whose keys have expired leave the list as it is read.
        """
        found: list[JobStatus] = []
        start = 0
        while len(found) < offset + limit:
            names, page = await self._page(start, start + 99)
            start += len(page)
            if not names:
                break
            found += [job for job in page if state in (None, job.state) and model in (None, job.model)]
        return found[offset : offset + limit]

    async def _page(self, first: int, last: int) -> tuple[list[str], list[JobStatus]]:
        """Ids of the list from `first` to `last`, and the jobs among them that Redis still knows."""
        index = f"{self.prefix}:jobs"
        names = decoded(
            await self.scripts.patiently(lambda: _reply(self.redis.zrevrange(index, first, last)))
        )
        replies = await self.scripts.call_many(
            "status", [(self.key(n), (self.prefix, FRESH_MS)) for n in names]
        )
        gone = [name for name, flat in zip(names, replies, strict=True) if not flat]
        if gone:
            await self.scripts.patiently(lambda: _reply(self.redis.zrem(index, *gone)))
        known = [(name, pairs(flat)) for name, flat in zip(names, replies, strict=True) if flat]
        return names, [JobStatus.from_hash(name, values) for name, values in known]

    async def workers(self) -> list[WorkerInfo]:
        """Those whose last heartbeat has not run out, the most recent first."""
        names = decoded(
            await self.scripts.patiently(
                lambda: _reply(self.redis.zrevrange(f"{self.prefix}:workers", 0, -1))
            )
        )
        hashes = [await self._hash(f"{self.prefix}:worker:{name}") for name in names]
        return [WorkerInfo.from_hash(values) for values in hashes if values]

    async def events(self, job: str, last_id: str = "0", block_ms: int = 0) -> list[Event]:
        """What happened after `last_id`, oldest first; waits up to `block_ms` for something to happen.

        The stream is capped and for watching only: a watcher who is late misses entries, never a result.
        """
        block = min(block_ms, int(SOCKET_TIMEOUT_S * 500)) or None
        read: dict[Any, Any] = {f"{self.key(job)}:events": last_id}
        reply = decoded(
            await self.scripts.patiently(lambda: _reply(self.redis.xread(read, count=1000, block=block)))
        )
        entries = reply[0][1] if reply else []
        return [Event(entry, data.pop("kind", ""), data) for entry, data in entries]

    async def overdue(self, limit: int = 100) -> list[str]:
        """Jobs past their deadline that nobody has stopped yet, by the server's clock."""
        name = f"{self.prefix}:deadlines"
        return cast(list[str], await self.scripts.call("overdue", name, self.prefix, limit))

    async def models(self) -> list[str]:
        """Models with unfinished jobs."""
        name = f"{self.prefix}:models"
        return sorted(decoded(await self.scripts.patiently(lambda: _reply(self.redis.smembers(name)))))

    async def unfinished(self, model: str) -> list[str]:
        name = f"{self.prefix}:model:{model}:jobs"
        return sorted(decoded(await self.scripts.patiently(lambda: _reply(self.redis.smembers(name)))))

    async def runnable(self, model: str, limit: int = 100) -> int:
        """How many tasks of the model could be leased now, counted up to `limit`."""
        name = f"{self.prefix}:model:{model}:ready"
        return int(await self.scripts.call("runnable", name, self.prefix, model, limit))

    async def wanted(self, model: str, worker: str, fingerprint: str = "", context: int = 0) -> Want:
        """Who waits for an engine with this model. fingerprint, context: of the asking worker's, where it
        has loaded the model before."""
        name = f"{self.prefix}:model:{model}:ready"
        args = (model, worker, fingerprint, context)
        return Want(*map(int, await self.scripts.call("wanted", name, self.prefix, *args)))

    async def _hash(self, name: str) -> dict[str, str]:
        values = await self.scripts.patiently(lambda: _reply(self.redis.hgetall(name)))
        return cast(dict[str, str], decoded(values))


def protocol_mismatch(theirs: str) -> ProtocolMismatch:
    return ProtocolMismatch(
        f"This Redis holds the state of protocol {theirs}, this program speaks {PROTOCOL}: "
        "install matching versions, or use another Redis."
    )


async def _reply(call: Any) -> Any:
    return await call
