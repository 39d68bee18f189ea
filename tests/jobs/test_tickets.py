"""Tickets by a real arq worker: taken once, put out again, never more than there are slots, never pickled."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from arq.connections import ArqRedis
from arq.constants import in_progress_key_prefix, job_key_prefix, result_key_prefix
from arq.worker import Worker, func
from redis.asyncio import Redis

from pagemill.jobs import tickets

Take = Callable[[dict[str, Any]], Awaitable[object]]


@pytest.fixture
def model() -> str:
    return f"org/model {uuid.uuid4().hex[:8]}"


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_url)
    yield client
    await client.aclose()


async def burst(redis_url: str, queue: str, take: Take, **settings: Any) -> Worker:
    """A real arq worker that takes what waits, and ends."""
    given: dict[str, Any] = {
        "redis_pool": ArqRedis.from_url(redis_url),
        "queue_name": queue,
        "burst": True,
        "poll_delay": 0.01,
        "keep_result": 0,
        "handle_signals": False,
        "job_serializer": tickets.serialize,
        "job_deserializer": tickets.deserialize,
    }
    worker = Worker([func(take, name=tickets.FUNCTION, max_tries=1)], **{**given, **settings})
    await worker.async_run()
    await worker.pool.aclose(close_connection_pool=True)
    return worker


async def test_a_ticket_is_taken_by_a_worker_of_its_model(redis_url: str, redis: Redis, model: str) -> None:
    seen: list[dict[str, Any]] = []

    async def take(ctx: dict[str, Any]) -> None:
        seen.append(ctx)

    assert await tickets.send(redis, model, 3) == 3
    await burst(redis_url, tickets.queue_name("another"), take)
    assert seen == []
    await burst(redis_url, tickets.queue_name(model), take)
    assert sorted(ctx["job_id"] for ctx in seen) == [tickets.ticket_id(model, slot) for slot in range(3)]
    assert await redis.zcard(tickets.queue_name(model)) == 0
    assert await tickets.send(redis, model, 1) == 1


async def test_a_slot_holds_one_ticket_however_often_it_is_sent(redis: Redis, model: str) -> None:
    assert await tickets.send(redis, model, 2) == 2
    assert await tickets.send(redis, model, 2) == 0
    assert await tickets.send(redis, model, 5) == 3
    assert await tickets.send(redis, model, 1000) == tickets.SLOTS - 5
    assert await tickets.send(redis, model, 1000) == 0
    assert await redis.zcard(tickets.queue_name(model)) == tickets.SLOTS


async def test_a_ticket_in_progress_does_not_count_as_one_that_waits(redis: Redis, model: str) -> None:
    """Its taker may have looked for work just before this work was there."""
    await tickets.send(redis, model, 1)
    first = tickets.ticket_id(model, 0)
    await redis.set(in_progress_key_prefix + first, "1", px=60_000)
    assert await tickets.send(redis, model, 1) == 1
    assert await redis.zscore(tickets.queue_name(model), tickets.ticket_id(model, 1)) == 1
    assert await tickets.send(redis, model, 1) == 0


async def test_work_that_comes_while_a_ticket_is_taken_gets_one_of_its_own(
    redis_url: str, redis: Redis, model: str
) -> None:
    taken = 0

    async def take(_ctx: dict[str, Any]) -> None:
        nonlocal taken
        taken += 1
        if taken == 1:
            await tickets.send(redis, model, 1)

    await tickets.send(redis, model, 1)
    await burst(redis_url, tickets.queue_name(model), take)
    assert taken == 2


@pytest.mark.parametrize("left", ["job", "queue"])
async def test_a_ticket_of_which_half_is_left_is_put_out_again(redis: Redis, model: str, left: str) -> None:
    """arq's payloads expire a day after they were sent, and its queue entries do not."""
    await tickets.send(redis, model, 1)
    job, queue = job_key_prefix + tickets.ticket_id(model, 0), tickets.queue_name(model)
    await redis.delete(queue if left == "job" else job)
    assert await tickets.send(redis, model, 1) == 1
    assert await redis.exists(job, queue) == 2


async def test_tickets_are_json_in_arqs_own_format(redis: Redis, model: str) -> None:
    await tickets.send(redis, model, 1)
    key = job_key_prefix + tickets.ticket_id(model, 0)
    stored = await redis.get(key)
    assert stored is not None
    assert json.loads(stored) == {"t": None, "f": "take", "a": [], "k": {}, "et": 0}
    assert 0 < await redis.pttl(key) <= 86_400_000


async def test_a_ticket_that_arq_wrote_and_one_of_ours_are_the_same(
    redis_url: str, redis: Redis, model: str
) -> None:
    pool = ArqRedis.from_url(redis_url)
    pool.job_serializer = tickets.serialize
    slot = tickets.ticket_id(model, 0)
    await pool.enqueue_job(tickets.FUNCTION, _job_id=slot, _queue_name=tickets.queue_name(model))
    theirs = json.loads(await redis.get(job_key_prefix + slot) or b"")
    assert await tickets.send(redis, model, 1) == 0
    await redis.delete(job_key_prefix + slot)
    assert await tickets.send(redis, model, 1) == 1
    ours = json.loads(await redis.get(job_key_prefix + slot) or b"")
    assert {**theirs, "et": 0} == ours
    await pool.aclose(close_connection_pool=True)


async def test_an_exception_is_stored_as_its_text_and_never_pickled(
    redis_url: str, redis: Redis, model: str
) -> None:
    class Odd(Exception):
        def __init__(self, what: str, code: int) -> None:
            super().__init__(f"{what} {code}")

    async def take(_ctx: dict[str, Any]) -> None:
        raise Odd("broke", 7)

    await tickets.send(redis, model, 1)
    worker = await burst(redis_url, tickets.queue_name(model), take, keep_result=60)
    assert worker.jobs_failed == 1
    key = result_key_prefix + tickets.ticket_id(model, 0)
    result = tickets.deserialize(await redis.get(key) or b"")
    assert (result["s"], result["r"]) == (False, "Odd: broke 7")
    assert await tickets.send(redis, model, 1) == 1  # an old result does not swallow the next ticket


async def test_a_prefix_keeps_two_installations_on_one_redis_apart(
    redis_url: str, redis: Redis, model: str
) -> None:
    ours, theirs = f"a-{uuid.uuid4().hex[:6]}", f"b-{uuid.uuid4().hex[:6]}"
    seen: list[str] = []

    async def take(ctx: dict[str, Any]) -> None:
        seen.append(ctx["job_id"])

    assert await tickets.send(redis, model, 1, prefix=ours) == 1
    assert await tickets.send(redis, model, 1, prefix=theirs) == 1
    await burst(redis_url, tickets.queue_name(model, ours), take)
    assert seen == [f"{ours}:ticket:{model}:0"]
    assert await redis.zcard(tickets.queue_name(model, theirs)) == 1


async def test_a_ticket_starts_at_once_whatever_the_workers_clock_says(
    redis_url: str, redis: Redis, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = asyncio.Event()

    async def take(_ctx: dict[str, Any]) -> None:
        seen.set()

    monkeypatch.setattr("arq.worker.timestamp_ms", lambda: 5_000)  # 1970
    await tickets.send(redis, model, 1)
    await burst(redis_url, tickets.queue_name(model), take)
    assert seen.is_set()
