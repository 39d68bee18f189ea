"""One worker in this process: jobs through it, stops, refusals, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from worker_place import Place, agree, eventually, rows_of, whole

from pagemill.jobs import layout, tickets
from pagemill.jobs.errors import ModelError, PagemillError, RedisUnavailable, StorageError
from pagemill.jobs.storage import decide
from pagemill.worker.main import main, run_worker
from pagemill.worker.settings import WorkerSettings

SLOW: dict[str, Any] = {"sim_delay_ms": 100, "sim_max_seqs": 4, "max_rows_in_flight": 8}


async def test_a_job_of_good_and_bad_rows(place: Place) -> None:
    lines = [
        {"prompt": "good"},
        {"prompt": ""},
        {"messages": [{"role": "user", "content": "hello"}], "id": "chat", "n": 2},
        {"prompt": "<<fail>>"},
        {"prompt": "good", "temperature": "hot"},
    ]
    async with place.worker(), place.client() as client:
        job = await client.submit(lines, model=place.model)
        rows = await whole(place, client, job, 5)
    assert [row.error_code for row in rows] == [
        None,
        "invalid_request",
        None,
        "numeric_error",
        "invalid_request",
    ]
    assert rows[2].custom_id == "chat"
    assert rows[2].choices is not None
    assert len(rows[2].choices) == 2
    assert rows[0].text
    assert rows[0].model == place.model
    assert rows[0].attempt == 1


async def test_every_line_bad_is_a_job_without_shards(place: Place) -> None:
    async with place.worker(), place.client() as client:
        job = await client.submit([{"prompt": ""}] * 3, model=place.model)
        rows = await whole(place, client, job, 3)
    assert {row.status for row in rows} == {"failed"}


async def test_a_worker_that_leaves_puts_out_a_ticket_for_what_it_hands_back(place: Place) -> None:
    async with place.client() as client, place.state() as state:
        async with place.worker():
            job = await client.submit(["<<slow:600000>>"], model=place.model)
            async with asyncio.timeout(20):
                while (await client.status(job)).rows_running == 0:
                    await asyncio.sleep(0.05)
            assert await state.redis.zcard(tickets.queue_name(place.model)) == 0
        assert await state.redis.zcard(tickets.queue_name(place.model)) == 1
        async with place.worker():
            await client.cancel(job)
            assert (await client.wait(job, timeout=30)).state == "cancelled"


async def test_rows_in_a_real_s3_server(place: Place, s3: Any) -> None:
    place.store = s3.url
    for name, value in s3.variables().items():
        os.environ[name] = value
    try:
        async with place.worker(), place.client() as client:
            job = await client.submit([f"p{i}" for i in range(50)], model=place.model)
            await whole(place, client, job, 50)
    finally:
        for name in s3.variables():
            del os.environ[name]


async def test_progress_is_there_while_it_runs(place: Place) -> None:
    async with place.worker(**SLOW), place.client() as client:
        job = await client.submit([f"p{i}" for i in range(100)], model=place.model)
        seen = []
        async for status in client.watch(job, poll=0.2):
            seen.append(status)
            assert status.completed + status.failed <= max(status.total, 0)
        assert any(0 < status.completed < 100 for status in seen)
        assert any(status.rows_running > 0 and status.workers_active == 1 for status in seen)
        (worker,) = [worker for worker in await client.workers() if worker.models == (place.model,)]
        assert worker.state == "ready"
    async with place.state() as state:
        assert not [worker for worker in await state.workers() if worker.models == (place.model,)]


async def test_cancelling_keeps_what_is_finished(place: Place) -> None:
    async with place.worker(**SLOW), place.client() as client:
        job = await client.submit([f"p{i}" for i in range(400)], model=place.model)
        await eventually(lambda: len(place.computed()) > 15)
        await client.cancel(job)
        status = await client.wait(job, timeout=20)
        rows = await rows_of(client, job)
    assert status.state == "cancelled"
    assert len(rows) == 400
    agree(status, rows)
    finished = {row.row_index for row in rows if row.status == "completed"}
    assert len(finished) > 15
    assert finished <= set(place.computed())
    assert {row.error_code for row in rows if row.status == "failed"} == {"batch_cancelled"}
    assert {row.attempt for row in rows if row.status == "failed"} == {0}, "they never ran"


async def test_a_deadline_ends_the_job_by_itself(place: Place) -> None:
    async with place.worker(**SLOW), place.client() as client:
        job = await client.submit(
            [f"p{i}" for i in range(400)], model=place.model, deadline=timedelta(seconds=2)
        )
        status = await client.wait(job, timeout=20)
        rows = await rows_of(client, job)
    assert status.state == "expired"
    agree(status, rows)
    assert {row.error_code for row in rows if row.status == "failed"} == {"batch_expired"}
    assert any(row.status == "completed" for row in rows)


async def test_a_stop_that_only_the_store_knows_counts(place: Place) -> None:
    """Whoever cancelled died between the store and Redis."""
    async with place.client() as client:
        job = await client.submit([f"p{i}" for i in range(20)], model=place.model)
        decide(place.storage(), layout.stop(job.id), {"reason": "cancelled", "at": time.time()})
        async with place.worker():
            status = await client.wait(job, timeout=20)
        assert status.state == "cancelled"
    assert place.computed() == {}


async def test_a_job_whose_ticket_was_lost_runs_all_the_same(place: Place) -> None:
    async with place.client() as client:
        job = await client.submit(["a"], model=place.model)
        async with place.state() as state:
            assert await state.redis.delete(f"pagemill:queue:{place.model}") == 1
        async with place.worker():
            await whole(place, client, job, 1)


async def test_a_small_job_starts_while_a_huge_one_fills_every_slot(place: Place) -> None:
    async with (
        place.worker(slots=1, sim_delay_ms=50, sim_max_seqs=4, max_rows_in_flight=8),
        place.client() as client,
    ):
        huge = await client.submit([f"p{i}" for i in range(3000)], model=place.model)
        await eventually(lambda: len(place.computed()) > 4)
        small = await client.submit(["a", "b"], model=place.model)
        await whole(place, client, small, 2, seconds=20)
        assert not (await client.status(huge)).terminal
        await client.cancel(huge)
        await client.wait(huge, timeout=20)


async def test_a_killed_engine_costs_a_restart_and_no_row(place: Place) -> None:
    async with place.client() as client, place.worker(sim_delay_ms=100, sim_max_seqs=16):
        job = await client.submit([f"p{i}" for i in range(100)], model=place.model)
        await eventually(lambda: len(place.computed()) >= 16)
        own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        engines = [
            int(pid)
            for pid in own
            if b"pagemill.worker.engine_child" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert len(engines) == 1
        os.kill(engines[0], signal.SIGKILL)
        rows = await whole(place, client, job, 100)
    assert {row.status for row in rows} == {"completed"}


async def test_a_poison_row_is_an_error_row_and_all_others_complete(place: Place) -> None:
    prompts = [f"p{i}" for i in range(40)]
    prompts[13] = "<<crash>>"
    async with place.worker(sim_delay_ms=5), place.client() as client:
        job = await client.submit(prompts, model=place.model)
        rows = await whole(place, client, job, 40)
    assert {row.row_index: row.error_code for row in rows if row.error_code} == {13: "poison_row"}


async def test_a_deadline_ends_a_job_that_nobody_serves(place: Place) -> None:
    """By a worker of another model: what is left to do needs no engine."""
    async with place.worker(), place.client() as client:
        job = await client.submit(["a", "b"], model=f"not-{place.model}", deadline=timedelta(seconds=0.5))
        status = await client.wait(job, timeout=60)
    assert (status.state, status.total) == ("expired", 0)


async def test_a_job_that_nobody_serves_ends_although_a_dead_worker_holds_its_plan(place: Place) -> None:
    model = f"not-{place.model}"
    async with place.client() as client, place.state() as state:
        job = await client.submit(["a", "b"], model=model, deadline=timedelta(seconds=0.5))
        assert await state.lease(model, worker="ghost", nonce="1", ttl_ms=4000, job=job.id) is not None
        async with place.worker():
            await asyncio.sleep(2)
            assert not (await client.status(job)).terminal
            status = await client.wait(job, timeout=60)
    assert (status.state, status.total) == ("expired", 0)


async def test_a_model_that_does_not_load_is_the_workers_fault(place: Place) -> None:
    async with place.client() as client:
        job = await client.submit(["a"], model=place.model)
        settings = place.settings(model="/nowhere/absent", name=place.model, engine="native")
        with pytest.raises(ModelError, match="There is no model at /nowhere/absent"):
            await run_worker(settings)
        status = await client.status(job)
        assert not status.terminal
        assert "model_load_error" in status.blocked_reason
        assert "/nowhere/absent" in status.blocked_reason
        async with place.worker():  # somebody mended it
            await whole(place, client, job, 1)
        assert (await client.status(job)).blocked_reason == ""


async def test_a_sick_engine_ends_the_worker_and_no_row(place: Place) -> None:
    async with place.client() as client:
        job = await client.submit([f"p{i}" for i in range(8)], model=place.model)
        with pytest.raises(ModelError, match="known-good row"):
            await asyncio.wait_for(run_worker(place.settings(sim_die_after_steps=1, sim_delay_ms=5)), 40)
        assert "engine failure" in (await client.status(job)).blocked_reason
        async with place.worker():
            rows = await whole(place, client, job, 8)
    assert {row.status for row in rows} == {"completed"}


async def test_stopping_does_not_wait_for_a_model_that_loads(place: Place) -> None:
    stop = asyncio.Event()
    async with place.client() as client:
        job = await client.submit(["", "a"], model=place.model)
        running = asyncio.create_task(run_worker(place.settings(sim_load_s=600), stop=stop))
        async with asyncio.timeout(20):
            while (await client.status(job)).state != "in_progress":
                await asyncio.sleep(0.05)  # planned meanwhile
        stop.set()
        await asyncio.wait_for(running, 20)
        await client.cancel(job)


async def test_other_weights_under_the_same_name_are_refused_and_said(place: Place) -> None:
    async with place.client() as client:
        job = await client.submit([f"p{i}" for i in range(60)], model=place.model)
        async with place.worker(**SLOW):
            await eventually(lambda: len(place.computed()) > 4)
        async with place.worker(sim_output_chars=7):
            await asyncio.sleep(0)
            async with asyncio.timeout(20):
                while "other weights" not in (await client.status(job)).blocked_reason:
                    await asyncio.sleep(0.05)
        async with place.worker():
            rows = await whole(place, client, job, 60)
    assert {len(row.text or "") for row in rows} == {120}


async def test_a_worker_with_another_store_says_so_and_the_right_one_goes_on(
    place: Place, tmp_path: Path
) -> None:
    async with place.client() as client:
        job = await client.submit(["a"], model=place.model)
        async with place.worker(store=str(tmp_path / "elsewhere")), asyncio.timeout(20):
            while "same store" not in (await client.status(job)).blocked_reason:
                await asyncio.sleep(0.05)
        async with place.worker():
            await whole(place, client, job, 1)
        assert (await client.status(job)).blocked_reason == ""


async def test_redis_that_is_not_there_is_one_sentence(place: Place) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = place.settings(redis_url=f"redis://127.0.0.1:{port}/0", redis_patience_s=0.2)
    with pytest.raises(RedisUnavailable, match="does not answer"):
        await run_worker(settings)


async def test_a_store_that_refuses_is_one_sentence(place: Place, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        await run_worker(place.settings(store=str(tmp_path / "file" / "store")))


async def test_a_metrics_port_in_use_is_one_sentence(place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PagemillError, match=r"Port .* for metrics"):
            await run_worker(place.settings(metrics_port=taken.getsockname()[1]))


def test_a_bad_setting_ends_the_process_with_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEMILL_SLOTS", "none")
    assert main() == 2
    assert "PAGEMILL_SLOTS" in capsys.readouterr().err


async def test_a_process_that_cannot_start_says_one_line_and_fails(place: Place, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    worker = place.spawn(store=str(tmp_path / "file" / "store"))
    assert await worker.ended() == StorageError.exit_code
    assert worker.said().startswith("pagemill: ")
    assert worker.said().count("\n") == 1


def test_the_served_name_follows_the_model(tmp_path: Path) -> None:
    (tmp_path / "Tiny-1B.gguf").write_bytes(b"")
    assert WorkerSettings(model=str(tmp_path / "Tiny-1B.gguf")).model_name == "Tiny-1B"
    assert WorkerSettings(model="smollm2").model_name == "smollm2"
    assert WorkerSettings(model="owner/name").model_name == "owner/name"
    assert WorkerSettings(model="owner/name", name="llama").model_name == "llama"
