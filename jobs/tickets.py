"""Tickets: "model M has work", carried by arq. One holds no work, so losing or doubling it costs time only.

    pagemill:queue:<model>                 arq's queue: a sorted set of ticket ids
    arq:job:pagemill:ticket:<model>:<k>    the ticket, k from 0 to 31

A worker's `take` function wakes its own leasing loop and returns in milliseconds; what it then runs is
decided by `State.lease`. At most 32 tickets of a model exist at once, however many jobs there are: arq's idle
workers look at the first hundred entries only, those in progress included.

This room may not know what a job is.
"""

from __future__ import annotations

import json
from typing import Any, Final

from arq.constants import expires_extra_ms
from arq.jobs import serialize_job
from redis.asyncio import Redis

from pagemill.jobs.script import Scripts

FUNCTION: Final = "take"
SLOTS: Final = 32


def queue_name(model: str, prefix: str = "pagemill") -> str:
    """Where tickets of a model wait: a worker's `queue_name`."""
    return f"{prefix}:queue:{model}"


def ticket_id(model: str, slot: int, prefix: str = "pagemill") -> str:
    """arq's names are global, hence the prefix: two installations on one Redis must not share slots."""
    return f"{prefix}:ticket:{model}:{slot}"


def serialize(job: dict[str, Any]) -> bytes:
    """arq's `job_serializer`: JSON, never pickle. An exception becomes its text."""
    return json.dumps(job, default=_described).encode()


def deserialize(data: bytes) -> dict[str, Any]:
    """arq's `job_deserializer`."""
    job: dict[str, Any] = json.loads(data)
    return job


def _described(value: object) -> str:
    return f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else repr(value)


async def send(
    redis: Redis, model: str, want: int, *, prefix: str = "pagemill", patience_s: float = 5.0
) -> int:
    """Sees to it that `want` tickets of the model (at most 32) wait in its queue; returns how many it put in.

    In arq's own wire format, in one round trip. A slot whose ticket is being taken at this moment does not
    count: its taker may have looked for work just before there was some. Sending twice puts out nothing more.
    """
    ticket = serialize_job(FUNCTION, (), {}, None, 0, serializer=serialize)
    assert ticket is not None
    ids = [ticket_id(model, slot, prefix) for slot in range(SLOTS)]
    queue = queue_name(model, prefix)
    scripts = Scripts(redis, patience_s)
    return int(await scripts.call("tickets", queue, prefix, want, expires_extra_ms, ticket, *ids))
