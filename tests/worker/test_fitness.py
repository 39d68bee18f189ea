"""A worker whose disk is full hands back what others could do, and comes back by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from worker_place import Place, whole

from pagemill.jobs.errors import DiskFull, StorageError
from pagemill.worker import fitness, shard
from pagemill.worker.fitness import Fitness, Unfit


def refuse() -> None:
    raise StorageError("The folder is full.")


def test_a_full_disk_is_waited_out_before_the_machine_is_doubted() -> None:
    judge = Fitness(refuse)
    judge.weigh(DiskFull("full"), fitness.PATIENCE_S - 1)
    judge.weigh(StorageError("503"), 10 * fitness.PATIENCE_S)
    assert judge.message == ""
    with pytest.raises(Unfit, match="full"):
        judge.weigh(DiskFull("full"), fitness.PATIENCE_S)
    assert judge.message == "full"


async def test_it_is_fit_again_when_a_probe_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitness, "PROBE_S", 0.0)
    refusing = [True, True, False]
    asked = iter(refusing)
    judge = Fitness(lambda: refuse() if next(asked) else None)
    assert await judge.fit(), "nothing was wrong"
    judge.doubt(DiskFull("full"))
    assert [await judge.fit() for _ in refusing] == [False, False, True]


async def test_probes_do_not_come_more_often_than_they_should() -> None:
    judge = Fitness(lambda: pytest.fail("too early"))
    judge.doubt(DiskFull("full"))
    assert not await judge.fit()


async def test_a_worker_with_a_full_disk_hands_its_shard_to_another(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first cannot commit; with a lease of ten minutes, only handing back lets the second one have it."""
    monkeypatch.setattr(fitness, "PATIENCE_S", 0.0)
    real = shard.commit_shard

    def full(*args: Any, **how: Any) -> Any:
        raise DiskFull("Could not merge: the disk for temporary files is full.")

    monkeypatch.setattr(shard, "commit_shard", full)
    async with place.worker(lease_ttl_s=600), place.client() as client:
        job = await client.submit([f"p{i}" for i in range(20)], model=place.model)
        async with asyncio.timeout(60):
            while not [w for w in await client.workers() if place.model in w.models and w.state == "sick"]:
                await asyncio.sleep(0.05)
        (sick,) = [w for w in await client.workers() if place.model in w.models]
        assert "full" in sick.message
        assert "full" in (await client.status(job)).blocked_reason
        place.spawn(lease_ttl_s=600)
        await whole(place, client, job, 20)
        monkeypatch.setattr(shard, "commit_shard", real)


async def test_a_worker_whose_disk_has_room_again_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitness, "PATIENCE_S", 0.0)
    monkeypatch.setattr(fitness, "PROBE_S", 0.2)
    real, left = shard.commit_shard, [2]

    def full_at_first(*args: Any, **how: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise DiskFull("Could not merge: the disk for temporary files is full.")
        return real(*args, **how)

    monkeypatch.setattr(shard, "commit_shard", full_at_first)
    async with place.worker(), place.client() as client:
        job = await client.submit([f"p{i}" for i in range(20)], model=place.model)
        await whole(place, client, job, 20)
    assert left == [0]
