"""A worker that may load several models: by turns, one at a time, and each job of each of them ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from worker_place import Place, eventually, whole

from pagemill.jobs.errors import ModelError, UsageError
from pagemill.worker.main import run_worker
from pagemill.worker.settings import WorkerSettings

SLOW: dict[str, Any] = {"sim_delay_ms": 150, "sim_max_seqs": 8, "max_rows_in_flight": 16}


def two(place: Place) -> tuple[str, str]:
    return f"{place.model}-a", f"{place.model}-b"


def jobs_in_order(place: Place) -> list[str]:
    """The job of each row that was computed, as it came."""
    if not place.sim_log.exists():
        return []
    return [rid.partition("/")[0] for rid in place.sim_log.read_text().split()]


async def test_a_job_of_another_model_gets_its_turn_before_the_huge_one_ends(place: Place) -> None:
    a, b = two(place)
    worker = await place.spawn(models=(a, b), model_slice_s=1, **SLOW).ready()
    async with place.client() as client:
        huge = await client.submit([f"p{i}" for i in range(600)], model=a)
        await eventually(lambda: place.computed())
        first_engine = worker.engine_pid()
        small = await client.submit(["one", "two"], model=b)
        await whole(place, client, small, 2)
        status = await client.status(huge)
        assert not status.terminal
        assert not Path(f"/proc/{first_engine}").exists(), "its memory is free"
        await whole(place, client, huge, 600)
    order = jobs_in_order(place)
    assert order.count(huge.id) == 600, "rows under way were finished, the rest handed back"
    assert worker.process.poll() is None


async def test_an_idle_worker_changes_at_once_and_says_what_it_has(place: Place) -> None:
    """With a slice of an hour: had it not been idle, the second job would still wait."""
    a, b = two(place)
    await place.spawn(models=(a, b), model_slice_s=3600).ready()
    async with place.client() as client:
        for model in (b, a, b):
            job = await client.submit(["x"], model=model)
            await whole(place, client, job, 1)
            (info,) = [info for info in await client.workers() if model in info.models]
            assert info.models == (a, b)
            assert info.loaded == model


async def test_a_row_longer_than_a_slice_is_finished_all_the_same(place: Place) -> None:
    a, b = two(place)
    async with place.client() as client:
        jobs = [
            await client.submit([f"<<slow:3000>> {i}" for i in range(4)], model=model) for model in (a, b)
        ]
        await place.spawn(models=(a, b), model_slice_s=0, max_rows_in_flight=2).ready()
        for job in jobs:
            await whole(place, client, job, 4)
    assert len(jobs_in_order(place)) == 8, "no row was thrown away by a turn"


async def test_two_workers_serve_two_huge_jobs_without_changing_for_ever(place: Place) -> None:
    a, b = two(place)
    async with place.client() as client:
        jobs = [await client.submit([f"p{i}" for i in range(300)], model=model) for model in (a, b)]
        for _ in range(2):
            await place.spawn(models=(a, b), model_slice_s=1, **SLOW).ready()
        for job in jobs:
            await whole(place, client, job, 300)
    said = "".join(worker.said() for worker in place.processes)
    assert said.count("makes room") <= 3, said


async def test_a_worker_leaves_what_another_serves_for_what_it_alone_may_serve(place: Place) -> None:
    """With a slice of an hour: both have `a`, and the one that may load `b` hands its shard back."""
    a, b = two(place)
    await place.spawn(models=(a, b), model_slice_s=3600, **SLOW).ready()
    async with place.client() as client:
        huge = await client.submit([f"p{i}" for i in range(1200)], model=a)
        await eventually(lambda: place.computed())
        await place.spawn(models=(a,), **SLOW).ready()
        small = await client.submit(["one", "two"], model=b)
        await whole(place, client, small, 2)
        assert not (await client.status(huge)).terminal
        await whole(place, client, huge, 1200)


async def test_a_model_that_does_not_load_leaves_the_others_at_work(place: Place) -> None:
    a, b = two(place)
    async with place.client() as client:
        lost = await client.submit(["never"], model=b)
        worker = await place.spawn(models=(f"{b}=<<fail>>", a), model_slice_s=0).ready()
        job = await client.submit(["x", "y"], model=a)
        await whole(place, client, job, 2)
        status = await client.status(lost)
        assert "told not to load" in status.blocked_reason
        assert not status.terminal
        (info,) = [info for info in await client.workers() if a in info.models]
        assert info.models == (a,), "others know that it does not serve it"
        assert worker.said().count("told not to load") == 1, "and it does not try for ever"
        later = await client.submit(["never"], model=b)
        assert "no worker serves" in (await client.status(later)).blocked_reason
        place.spawn(models=(b,))  # the cause is mended
        await whole(place, client, lost, 1)
        await whole(place, client, later, 1)


async def test_a_worker_none_of_whose_models_loads_ends(place: Place) -> None:
    a, b = two(place)
    settings = place.settings(models=(f"{a}=<<fail>>", f"{b}=<<fail>>"))
    with pytest.raises(ModelError, match="told not to load"):
        await asyncio.wait_for(run_worker(settings), 60)


async def test_a_cancelled_job_of_a_model_that_is_not_loaded_ends_without_loading_it(place: Place) -> None:
    a, b = two(place)
    worker = await place.spawn(models=(a, b), model_slice_s=3600, **SLOW).ready()
    async with place.client() as client:
        huge = await client.submit([f"p{i}" for i in range(200)], model=a)
        await eventually(lambda: place.computed())
        small = await client.submit(["x"] * 3, model=b)
        async with asyncio.timeout(30):
            while (await client.status(small)).state == "validating":
                await asyncio.sleep(0.05)
        await client.cancel(small)
        status = await client.wait(small, timeout=30)
        assert (status.state, status.failed) == ("cancelled", 3)
        assert not (await client.status(huge)).terminal
    assert "makes room" not in worker.said()


def test_models_have_names_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny-1B"
    folder.mkdir()
    settings = WorkerSettings(models=(str(folder), f"other={folder}", "owner/name"))
    assert [choice.name for choice in settings.choices] == ["Tiny-1B", "other", "owner/name"]
    assert [choice.source for choice in settings.choices] == [str(folder), str(folder), "owner/name"]
    with pytest.raises(UsageError, match="same name"):
        WorkerSettings.load(models=(str(folder), "Tiny-1B"))
    with pytest.raises(UsageError, match="--name"):
        WorkerSettings.load(models=("a", "b"), name="c")


def test_models_come_as_a_variable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_MODELS", "a, b=x/y")
    assert [(c.name, c.source) for c in WorkerSettings().choices] == [("a", "a"), ("b", "x/y")]
