"""Credits: first come, first served, and none is lost with whoever waited for it."""

from __future__ import annotations

import asyncio

from pagemill.worker.credits import Credits


async def test_a_waiting_submitter_that_is_cancelled_takes_no_credit() -> None:
    pool = Credits(1, 100)
    await pool.take(10)
    first, second = asyncio.create_task(pool.take(10)), asyncio.create_task(pool.take(10))
    await asyncio.sleep(0)
    first.cancel()
    pool.give(10)
    await asyncio.wait_for(second, 1)
    pool.give(10)
    await asyncio.wait_for(pool.take(10), 1)


async def test_a_credit_granted_to_a_submitter_cancelled_in_the_same_moment_goes_on() -> None:
    pool = Credits(1, 100)
    await pool.take(10)
    first, second = asyncio.create_task(pool.take(10)), asyncio.create_task(pool.take(10))
    await asyncio.sleep(0)
    pool.give(10)
    first.cancel()
    await asyncio.wait_for(second, 1)


async def test_a_row_larger_than_all_the_bytes_goes_alone() -> None:
    pool = Credits(8, 100)
    await pool.take(10)
    large = asyncio.create_task(pool.take(1000))
    small = asyncio.create_task(pool.take(1))
    await asyncio.sleep(0)
    assert not large.done()
    assert not small.done(), "first come, first served: else the large one would wait for ever"
    pool.give(10)
    await asyncio.wait_for(large, 1)
    await asyncio.sleep(0)
    assert not small.done()
    pool.give(1000)
    await asyncio.wait_for(small, 1)
