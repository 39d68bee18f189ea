"""The real engine behind the host, and whole jobs through it, on a tiny model and on the demo model."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make_tiny_model
from worker_place import Place, eventually, whole

from pagemill.jobs.errors import ModelError
from pagemill.worker.engine_host import EngineHost
from pagemill.worker.main import host_config
from pagemill.worker.models import find_demo_model
from pagemill.worker.settings import WorkerSettings

NATIVE: dict[str, Any] = {"engine": "native", "dtype": "float32", "kv_cache_gb": 0.05, "threads": 1}
Message = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
async def host(model: str) -> AsyncIterator[EngineHost]:
    started = EngineHost(host_config(WorkerSettings(model=model, max_rows_in_flight=16, **NATIVE)))
    info = await started.start()
    assert info.context == 512
    assert info.fingerprint
    yield started
    await started.close()


async def test_kernels_have_run_before_the_first_row_comes(host: EngineHost) -> None:
    async with asyncio.timeout(10):
        while not host.health().figures:
            await asyncio.sleep(0.05)
    assert host.health().figures["steps"] >= 2
    assert host.health().figures["running"] == 0


def row(prompt: str, **params: Any) -> dict[str, Any]:
    return {
        "row_index": 0,
        "custom_id": "x",
        "kind": "completion",
        "prompt": prompt,
        "params": params,
        "seed": 7,
    }


async def answers(host: EngineHost, rows: dict[str, dict[str, Any]]) -> dict[str, Message]:
    found: dict[str, Message] = {}
    done = asyncio.Event()

    def sink(message: Message) -> None:
        found[message["rid"]] = message
        if len(found) == len(rows):
            done.set()

    for rid, it in rows.items():
        await host.submit(rid, it, sink)
    await asyncio.wait_for(done.wait(), 60)
    return found


def kill_at_work(host: EngineHost) -> None:
    """Kill an engine that has been handed as many rows as it may hold while others wait for their turn.

    This loop stands still meanwhile and hears of no completion. So however fast the engine is, those that
    wait need the next one.
    """
    health = host.health()
    assert health.rows_in_flight == health.rows_limit
    assert health.pid is not None
    deadline = time.monotonic() + 1  # a test that is paused for all of their steps finds none in one
    while len(host.under_way()) < 2 and time.monotonic() < deadline:  # a single one is being prepared
        time.sleep(0.001)
    os.kill(health.pid, signal.SIGKILL)


async def test_rows_of_every_kind_abort_and_a_killed_engine(host: EngineHost) -> None:
    """One engine for all of it: a start costs seconds."""
    rows = {f"g{i}": row(f"greedy {i}", temperature=0, max_tokens=20 + i) for i in range(12)}
    rows |= {f"s{i}": row(f"sampled {i}", temperature=1.5, max_tokens=20, n=2) for i in range(4)}
    rows |= {"long": row("x" * 600), "logprobs": row("a", logprobs=2, max_tokens=3, ignore_eos=True)}
    first = await answers(host, rows)
    assert {rid for rid, message in first.items() if message["status"] != "completed"} == {"long"}
    assert first["long"]["error_code"] == "prompt_too_long"
    assert len(first["s0"]["choices"]) == 2
    assert first["s0"]["choices"][0]["text"] != first["s0"]["choices"][1]["text"]
    assert first["g0"]["completion_tokens"] <= 20
    assert "logprobs" in first["logprobs"]["choices"][0]

    long = {f"a{i}": row("abort", max_tokens=400, ignore_eos=True) for i in range(8)}
    for rid, it in long.items():
        await host.submit(rid, it, lambda message: pytest.fail(f"{message['rid']} was aborted"))
    host.abort(long)
    await eventually(lambda: host.health().rows_in_flight == 0)

    again = asyncio.create_task(answers(host, {f"again {rid}": it for rid, it in rows.items()}))
    for _ in range(2):  # the loop's turns: as many as may be are handed down in one, and written in the next
        await asyncio.sleep(0)
    kill_at_work(host)
    second = await again
    assert host.health().restarts == 1
    for rid, message in first.items():
        repeated = second[f"again {rid}"]
        assert repeated.get("choices") == message.get("choices"), "a row computed again repeats"
    assert host.health().rows_in_flight == 0


async def test_a_model_that_is_damaged_is_one_sentence(tmp_path: Path) -> None:
    damaged = make_tiny_model(tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"not weights")
    host = EngineHost(host_config(WorkerSettings(model=str(damaged), **NATIVE)))
    with pytest.raises(ModelError, match="safetensors") as caught:
        await host.start()
    assert "\n" not in str(caught.value)
    await host.close()


async def test_a_whole_job_with_a_real_engine_in_a_real_s3_server(
    place: Place, s3: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.variables().items():
        monkeypatch.setenv(name, value)
    place.store = s3.url
    lines: list[dict[str, Any]] = [{"prompt": f"row {i}"} for i in range(20)]
    lines += [{"messages": [{"role": "user", "content": "hello"}]}, {"prompt": ""}, {"prompt": "x" * 600}]
    async with place.worker(**{**NATIVE, "model": model, "name": place.model}), place.client() as client:
        job = await client.submit(lines, model=place.model, max_tokens=12, temperature=0)
        rows = await whole(place, client, job, 23)
    assert [r.row_index for r in rows if r.error_code] == [21, 22]
    assert rows[22].error_code == "prompt_too_long"
    assert rows[20].kind == "chat"
    assert all(r.completion_tokens for r in rows[:21])


@pytest.mark.skipif(find_demo_model() is None, reason="the demo model is not here: infra/model.py fetches it")
async def test_the_demo_model_answers_in_english_and_repeats_itself_after_a_kill(place: Place) -> None:
    settings: dict[str, Any] = {**NATIVE, "model": "smollm2", "name": place.model, "kv_cache_gb": 0.25}
    asked = {"What is the capital of France?": "Paris", "What is 2 + 2?": "4"}
    lines = [{"messages": [{"role": "user", "content": question}]} for question in asked]
    async with place.client() as client:
        worker = await place.spawn(**settings).ready()
        job = await client.submit(lines, model=place.model, max_tokens=16, temperature=0)
        first = await whole(place, client, job, 2)
        assert [word in (r.text or "") for r, word in zip(first, asked.values(), strict=True)] == [True, True]
        again = await client.submit(lines, model=place.model, max_tokens=16, temperature=0)
        os.kill(worker.engine_pid(), signal.SIGKILL)
        second = await whole(place, client, again, 2)
    assert [r.text for r in second] == [r.text for r in first]
