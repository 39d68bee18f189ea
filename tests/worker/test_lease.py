"""Leases are kept by a thread that shares nothing with the work, and work learns from it when to stop."""

from __future__ import annotations

import asyncio
import time

import pytest
from worker_place import Place, eventually

from pagemill.jobs.state import State, new_nonce
from pagemill.jobs.status import Lease
from pagemill.worker.lease import Guard, Heartbeat, Released

TTL_S = 1.0


async def leased(place: Place, state: State, worker: str = "w") -> Lease | None:
    ttl_ms = int(TTL_S * 1000)
    return await state.lease(place.model, worker=worker, nonce=new_nonce(), ttl_ms=ttl_ms)


async def held(place: Place, state: State) -> tuple[Heartbeat, Guard]:
    async with place.client() as client:
        await client.submit(["a"], model=place.model)
    lease = await leased(place, state)
    assert lease is not None
    heartbeat = Heartbeat(place.redis_url, "w", TTL_S)
    heartbeat.start()
    return heartbeat, heartbeat.hold(lease)


async def test_a_lease_outlives_an_event_loop_that_is_stuck(place: Place) -> None:
    async with place.state() as state:
        heartbeat, guard = await held(place, state)
        time.sleep(2.5 * TTL_S)  # the loop of the work, not that of the renewals
        assert await leased(place, state, "other") is None
        await asyncio.sleep(0.1)
        assert guard.check() is None
        await heartbeat.close()


async def test_what_is_dropped_runs_out(place: Place) -> None:
    async with place.state() as state:
        heartbeat, guard = await held(place, state)
        heartbeat.drop(guard)
        async with asyncio.timeout(10):
            while await leased(place, state, "other") is None:
                await asyncio.sleep(0.1)
        assert not guard.lost, "nobody asked any more"
        await heartbeat.close()


async def test_a_stop_arrives(place: Place) -> None:
    async with place.state() as state:
        heartbeat, guard = await held(place, state)
        await state.stop(guard.lease.job, "cancelled")
        await asyncio.wait_for(guard.changed.wait(), 10)
        assert guard.check() == "cancelled"
        await heartbeat.close()


async def test_a_lease_that_somebody_else_has_is_lost(place: Place) -> None:
    async with place.state() as state:
        heartbeat, guard = await held(place, state)
        await state.release(guard.lease.job, guard.lease.task, guard.lease.fence)
        assert await leased(place, state, "other") is not None
        await asyncio.wait_for(guard.gone.wait(), 10)
        with pytest.raises(Released):
            guard.check()
        await heartbeat.close()


async def test_leaving_ends_work_in_threads(place: Place) -> None:
    async with place.state() as state:
        heartbeat, guard = await held(place, state)
        guard.leave()
        assert guard.changed.is_set()
        with pytest.raises(Released):
            guard.check()
        await heartbeat.close()


async def test_a_redis_that_is_away_at_first_is_waited_for(place: Place) -> None:
    """The thread starts without Redis, and goes on trying."""
    heartbeat = Heartbeat("redis://127.0.0.1:1/0", "w", TTL_S)
    heartbeat.start()
    lease = Lease("job-x", "plan", "plan", None, "1", 1, "validating", None, 0, 1, False, 1000, "")
    guard = heartbeat.hold(lease)
    await asyncio.sleep(0.5)
    assert heartbeat._thread is not None
    assert heartbeat._thread.is_alive()
    assert not guard.lost
    await heartbeat.close()
    await eventually(lambda: heartbeat._thread is not None and not heartbeat._thread.is_alive())
