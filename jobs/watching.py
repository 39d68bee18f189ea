"""Following a job: one status after the other, until it has ended. This room may not know who looks on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from pagemill.jobs.errors import JobNotFound, RedisUnavailable
from pagemill.jobs.status import JobStatus

if TYPE_CHECKING:
    from pagemill.jobs.client import Client


async def watch(client: Client, name: str, poll: float, patience: float) -> AsyncIterator[JobStatus]:
    """The status now, then whenever it changed; see `Client.watch`."""
    status = last = await client.status(name)
    yield status
    read, lost_since = "$", None
    while not status.terminal:
        try:
            state = await client.state()
            events = await state.events(name, read, block_ms=max(1, int(poll * 1000)))
            read = events[-1].id if events else read
            seen, lost = await client.look(name)
            if lost:
                raise JobNotFound(seen.blocked_reason)
            status, lost_since = seen, None
        except (RedisUnavailable, JobNotFound):
            lost_since = lost_since or time.monotonic()
            if time.monotonic() - lost_since > patience:
                raise
            await asyncio.sleep(poll)
        if status != last:
            yield status
        last = status
