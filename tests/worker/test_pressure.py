"""What memory bears: the batch is lowered before anybody is blamed, and grows again."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_place import Place, eventually, whole

from pagemill.jobs.errors import ModelError
from pagemill.worker.credits import Credits
from pagemill.worker.engine_child import _out_of_memory
from pagemill.worker.engine_host import EngineHost
from pagemill.worker.pressure import Pressure


def row(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "seed": 1, "params": {}}


class Collected:
    def __init__(self) -> None:
        self.messages: dict[str, Any] = {}

    def __call__(self, message: dict[str, Any]) -> None:
        self.messages[message["rid"]] = message


async def fed(host: EngineHost, prompts: list[str]) -> tuple[Collected, asyncio.Task[None]]:
    collected = Collected()

    async def feed() -> None:
        for i, prompt in enumerate(prompts):
            await host.submit(f"r{i}", row(prompt), collected)

    return collected, asyncio.create_task(feed())


@given(full=st.integers(1, 1000), deaths=st.lists(st.integers(0, 1000), max_size=20))
def test_a_limit_falls_with_deaths_and_comes_back_with_quiet(full: int, deaths: list[int]) -> None:
    pressure = Pressure(full, quiet_s=10)
    for rows in deaths:
        before = pressure.limit
        changed = pressure.ran_out(rows)
        assert 1 <= pressure.limit <= before
        assert changed == (pressure.limit < before)
        if rows > 1:
            assert pressure.limit <= rows / 2
    for _ in range(11 * 11):
        pressure.passed(1.0)
    assert pressure.limit == full
    assert not pressure.passed(1000.0)


def test_a_death_starts_the_quiet_anew() -> None:
    pressure = Pressure(64, quiet_s=10)
    pressure.ran_out(64)
    assert not pressure.passed(9)
    pressure.ran_out(0)
    assert not pressure.passed(9)
    assert pressure.passed(1)
    assert pressure.limit == 64


async def test_credits_that_are_taken_away_come_back_before_new_ones_are_given() -> None:
    pool = Credits(4, 100)
    for _ in range(4):
        await pool.take(1)
    pool.resize(2)
    waiting = asyncio.create_task(pool.take(1))
    for _ in range(2):
        pool.give(1)
        await asyncio.sleep(0)
        assert not waiting.done()
    pool.give(1)
    await asyncio.wait_for(waiting, 1)
    pool.resize(4)
    for _ in range(2):
        await asyncio.wait_for(pool.take(1), 1)


async def test_memory_that_runs_out_lowers_the_batch_and_blames_no_row(
    start_host: Any, caplog: pytest.LogCaptureFixture
) -> None:
    host = await start_host(rows=32, sim_delay_ms=5)
    collected, feeding = await fed(host, [f"<<memory:5>> {i}" for i in range(60)])
    await eventually(lambda: len(collected.messages) == 60)
    await feeding
    assert {message["status"] for message in collected.messages.values()} == {"completed"}
    health = host.health()
    assert 1 <= health.rows_limit <= 5
    assert health.restarts <= 5, "it is halved, so few deaths find what is borne"
    assert "rows at once from now on" in caplog.text


async def test_the_batch_grows_again_after_a_quiet_time(
    start_host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill.worker.engine_host.TICK_S", 0.05)
    host = await start_host(rows=8, sim_delay_ms=5, quiet_s=0.1)
    collected, _ = await fed(host, [f"<<memory:3>> {i}" for i in range(8)])
    await eventually(lambda: len(collected.messages) == 8)
    await eventually(lambda: host.health().rows_limit == 8)
    again, _ = await fed(host, [f"x{i}" for i in range(30)])
    await eventually(lambda: len(again.messages) == 30)


async def test_a_row_that_is_killed_alone_lowers_nothing_for_the_others(start_host: Any) -> None:
    host = await start_host(rows=16, sim_delay_ms=5)
    collected, _ = await fed(host, [f"{i}<<crash>>" if i == 3 else str(i) for i in range(16)])
    await eventually(lambda: len(collected.messages) == 16)
    assert [rid for rid, m in collected.messages.items() if m["status"] == "failed"] == ["r3"]
    assert host.health().rows_limit == 16


async def test_a_hang_is_no_pressure(start_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """We kill it ourselves, which says nothing about memory."""
    monkeypatch.setattr("pagemill.worker.engine_host.TICK_S", 0.1)
    host = await start_host(rows=8, stall_timeout_s=0.5, stall_token_s=0.1)
    collected, _ = await fed(host, ["<<hang>>", "x"])
    await eventually(lambda: len(collected.messages) == 2)
    assert host.health().rows_limit == 8


async def test_an_engine_that_dies_of_ever_other_rows_is_given_up(
    start_host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each life finishes rows, so none is to blame; the machine is."""
    monkeypatch.setattr("pagemill.worker.engine_host.RESTLESS_DEATHS", 5)
    host = await start_host(rows=4)
    collected, feeding = await fed(host, [f"<<slow:50>> {i}" for i in range(10_000)])
    broken = asyncio.create_task(host.broken())
    killed, seen = set[int](), 0
    while not broken.done():
        pid = host.health().pid
        if pid is not None and pid not in killed and len(collected.messages) > seen:
            seen = len(collected.messages)
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)
    feeding.cancel()
    with pytest.raises(ModelError, match="5 times lately, each of other rows"):
        broken.result()
    assert len(killed) == 5
    assert {message["status"] for message in collected.messages.values()} == {"completed"}


def test_what_counts_as_out_of_memory() -> None:
    class OutOfMemoryError(RuntimeError):
        """torch.cuda's has this name."""

    assert _out_of_memory(MemoryError())
    assert _out_of_memory(OutOfMemoryError("CUDA out of memory"))
    assert _out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to …"))
    assert not _out_of_memory(RuntimeError("shape mismatch"))
    assert not _out_of_memory(KeyError("memory"))


async def test_a_job_too_large_for_the_memory_completes_on_a_whole_worker(place: Place) -> None:
    await place.spawn(metrics_port=0).ready()
    async with place.client() as client:
        job = await client.submit([f"<<memory:4>> {i}" for i in range(60)], model=place.model)
        rows = await whole(place, client, job, 60)
    assert {row.status for row in rows} == {"completed"}
    assert "rows at once from now on" in place.processes[0].said()
