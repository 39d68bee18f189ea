"""What every worker does each second for all: tickets for what waits, and a registry that tells the truth."""

from __future__ import annotations

import asyncio

from worker_place import Place, eventually

from pagemill.jobs import tickets


async def test_a_full_worker_puts_out_tickets_for_what_it_cannot_take(place: Place) -> None:
    slow = {"sim_delay_ms": 2000, "sim_max_seqs": 4, "max_rows_in_flight": 4}
    async with place.worker(slots=1, **slow), place.client() as client, place.state() as state:
        job = await client.submit([f"p{i}" for i in range(5000)], model=place.model)
        async with asyncio.timeout(20):
            while not (await client.status(job)).shards_total:
                await asyncio.sleep(0.05)
        await state.redis.delete(tickets.queue_name(place.model))
        async with asyncio.timeout(20):
            while not await state.redis.zcard(tickets.queue_name(place.model)):
                await asyncio.sleep(0.05)
        await client.cancel(job)


async def test_the_registry_says_what_a_worker_is_doing(place: Place) -> None:
    async with place.state() as state:

        async def seen() -> list[str]:
            return [worker.state for worker in await state.workers() if worker.models == (place.model,)]

        worker = place.spawn(sim_load_s=1.5)
        async with asyncio.timeout(30):
            while await seen() != ["starting"]:
                await asyncio.sleep(0.05)
            while await seen() != ["ready"]:
                await asyncio.sleep(0.05)
        worker.process.terminate()
        await eventually(lambda: worker.process.poll() is not None)
        assert await seen() == []
