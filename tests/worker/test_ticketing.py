"""Tickets wake the leasing loop, whatever arq or Redis do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from worker_place import Place, eventually

from pagemill.jobs import tickets
from pagemill.worker.main import cancelled
from pagemill.worker.ticketing import Ticketing


class Sleeper:
    """Counts how often it is woken."""

    def __init__(self) -> None:
        self.woken, self.full = 0, False

    def wake(self) -> None:
        self.woken += 1


async def test_a_ticket_wakes_and_leaves_nothing_behind(place: Place) -> None:
    sleeper = Sleeper()
    ticketing = Ticketing(place.redis_url, place.model, sleeper)
    running = asyncio.create_task(ticketing.run())
    redis: Redis = Redis.from_url(place.redis_url)
    try:
        for count in (1, 2):
            await tickets.send(redis, place.model, 1)
            await eventually(lambda count=count: sleeper.woken >= count)  # type: ignore[misc]
        names: list[bytes] = []
        async with asyncio.timeout(10):
            while names := [name async for name in redis.scan_iter(f"*{place.model}*")]:
                if all(name.endswith(b":health") or b":health:" in name for name in names):
                    break
                await asyncio.sleep(0.05)
    finally:
        await cancelled([running])
        await ticketing.close()
        await redis.aclose()


async def test_a_full_worker_leaves_tickets_to_others(place: Place) -> None:
    busy, idle = Sleeper(), Sleeper()
    busy.full = True
    several = [Ticketing(place.redis_url, place.model, sleeper) for sleeper in (busy, idle)]
    running = [asyncio.create_task(ticketing.run()) for ticketing in several]
    redis: Redis = Redis.from_url(place.redis_url)
    try:
        for count in range(1, 6):
            await tickets.send(redis, place.model, 1)
            await eventually(lambda count=count: idle.woken >= count)  # type: ignore[misc]
        assert busy.woken == 0
    finally:
        await cancelled(running)
        for ticketing in several:
            await ticketing.close()
        await redis.aclose()


async def test_it_takes_tickets_again_after_redis_was_away(redis_server: Any, tmp_path: Path) -> None:
    sleeper = Sleeper()
    ticketing = Ticketing(redis_server.url, "m", sleeper)
    running = asyncio.create_task(ticketing.run())
    try:
        redis: Redis = Redis.from_url(redis_server.url)
        await tickets.send(redis, "m", 1)
        await eventually(lambda: sleeper.woken == 1)
        await redis.aclose()
        redis_server.kill()
        await asyncio.sleep(2)
        await asyncio.to_thread(redis_server.start)
        redis = Redis.from_url(redis_server.url)
        await tickets.send(redis, "m", 1, patience_s=10)
        await eventually(lambda: sleeper.woken >= 2)
        await redis.aclose()
        assert not running.done()
    finally:
        await cancelled([running])
        await ticketing.close()
