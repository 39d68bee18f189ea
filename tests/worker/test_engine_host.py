"""The engine behind its interface: real processes, killed, hung and abandoned."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from worker_place import eventually

from pagemill.jobs.errors import ModelError
from pagemill.worker.engine_host import EngineHost, HostConfig

StartHost = Callable[..., Awaitable[EngineHost]]
Message = dict[str, Any]


def row(prompt: str, seed: int = 1) -> dict[str, Any]:
    return {"row_index": 0, "prompt": prompt, "params": {}, "seed": seed}


class Collected:
    """A sink that remembers, and says when it has enough."""

    def __init__(self, wanted: int) -> None:
        self.messages: dict[str, Message] = {}
        self._wanted, self._enough = wanted, asyncio.Event()

    def __call__(self, message: Message) -> None:
        assert message["rid"] not in self.messages, "answered twice"
        self.messages[message["rid"]] = message
        if len(self.messages) >= self._wanted:
            self._enough.set()

    async def all(self, seconds: float = 20) -> dict[str, Message]:
        await asyncio.wait_for(self._enough.wait(), seconds)
        return self.messages


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def gone(pid: int, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while alive(pid):
            await asyncio.sleep(0.02)


async def test_every_row_comes_back_once(start_host: StartHost) -> None:
    host, collected = await start_host(rows=16), Collected(500)
    for i in range(500):
        await host.submit(f"r{i}", row(f"prompt {i}"), collected)
    messages = await collected.all()
    assert len({message["choices"][0]["text"] for message in messages.values()}) == 500
    assert host.health().rows_in_flight == 0


async def test_the_same_row_gives_the_same_text(start_host: StartHost) -> None:
    host, collected = await start_host(), Collected(3)
    await host.submit("a", row("same", 5), collected)
    await host.submit("b", row("same", 5), collected)
    await host.submit("c", row("same", 6), collected)
    texts = {rid: message["choices"][0]["text"] for rid, message in (await collected.all()).items()}
    assert texts["a"] == texts["b"] != texts["c"]


async def test_no_more_rows_are_down_than_there_are_credits(start_host: StartHost) -> None:
    host, collected = await start_host(rows=4, sim_delay_ms=50), Collected(5)
    for i in range(4):
        await host.submit(f"r{i}", row("x"), collected)
    fifth = asyncio.create_task(host.submit("r4", row("x"), collected))
    await asyncio.sleep(0)
    assert not fifth.done()
    assert host.health().rows_in_flight == 4
    await collected.all()


async def test_an_aborted_row_is_forgotten_and_its_credit_returns(start_host: StartHost) -> None:
    host, never = await start_host(rows=2), Collected(1)
    await host.submit("a", row("<<slow:600000>>"), never)
    await host.submit("b", row("<<slow:600000>>"), never)
    host.abort(["a", "b", "unknown"])
    collected = Collected(2)
    async with asyncio.timeout(10):
        await host.submit("c", row("x"), collected)
        await host.submit("d", row("x"), collected)
    await collected.all()
    assert never.messages == {}


async def test_every_row_that_is_recalled_is_heard_of_and_a_finished_one_with_its_completion(
    start_host: StartHost,
) -> None:
    host, collected = await start_host(rows=3), Collected(3)
    await host.submit("done", row("x"), collected)
    await host.submit("long", row("<<slow:600000>>"), collected)
    await host.submit("late", row("<<slow:600000>>"), collected)
    await asyncio.sleep(0)
    # This loop has not listened since: whatever the first has come to is still on its way.
    time.sleep(0.5)
    for _ in range(2):
        host.recall(["done", "long", "late", "unknown"])
    messages = await collected.all()
    assert {rid: message["status"] for rid, message in messages.items()} == {
        "done": "completed",
        "long": "aborted",
        "late": "aborted",
    }
    assert host.health().rows_in_flight == 0


async def test_a_row_that_is_recalled_from_a_dead_engine_comes_back(start_host: StartHost) -> None:
    host, collected = await start_host(rows=2), Collected(2)
    for rid in "ab":
        await host.submit(rid, row("<<slow:600000>>"), collected)
    pid = host.health().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    host.recall(["a", "b"])
    assert {message["status"] for message in (await collected.all()).values()} == {"aborted"}
    after = Collected(1)
    await host.submit("c", row("x"), after)
    assert (await after.all())["c"]["status"] == "completed"


async def test_rows_that_are_aborted_at_once_leave_the_engine_usable(start_host: StartHost) -> None:
    """The abort takes the faster channel and may overtake its row."""
    host = await start_host(rows=8, sim_delay_ms=5)
    for round_ in range(20):
        for i in range(8):
            await host.submit(f"{round_}/{i}", row("<<slow:600000>>"), Collected(1))
        host.abort([f"{round_}/{i}" for i in range(8)])
    collected = Collected(1)
    await host.submit("last", row("x"), collected)
    assert (await collected.all())["last"]["status"] == "completed"


async def test_a_killed_child_is_started_again_and_its_rows_run_again(start_host: StartHost) -> None:
    host, collected = await start_host(rows=65, sim_delay_ms=100), Collected(65)
    for i in range(64):
        await host.submit(f"r{i}", row(f"p{i}"), collected)
    await eventually(lambda: host.under_way() or collected.messages)
    pid = host.health().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    # Were this test paused until the others are finished, this one would need another engine all the same.
    await host.submit("r64", row("p64"), collected)
    messages = await collected.all()
    assert {message["status"] for message in messages.values()} == {"completed"}
    assert host.health().restarts == 1


async def test_a_poison_row_is_found_and_its_neighbours_finish(start_host: StartHost) -> None:
    host, collected = await start_host(rows=64, sim_delay_ms=5), Collected(40)
    for i in range(40):
        await host.submit(f"r{i}", row(f"p{i}" + ("<<crash>>" if i == 17 else "")), collected)
    messages = await collected.all()
    failed = {
        rid: message["error_code"] for rid, message in messages.items() if message["status"] != "completed"
    }
    assert failed == {"r17": "poison_row"}


async def test_a_sick_machine_makes_no_row_poison(start_host: StartHost) -> None:
    host, collected = await start_host(rows=8, sim_die_after_steps=1, sim_delay_ms=5), Collected(1)
    for i in range(4):
        await host.submit(f"r{i}", row(f"p{i}"), collected)
    with pytest.raises(ModelError, match="known-good row"):
        await asyncio.wait_for(host.broken(), 30)
    assert collected.messages == {}


async def test_a_row_that_hangs_its_engine_is_poison_too(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill.worker.engine_host.TICK_S", 0.2)
    host = await start_host(rows=4, stall_timeout_s=1.0, stall_token_s=0.1)
    collected = Collected(2)
    await host.submit("bad", row("<<hang>>"), collected)
    await host.submit("good", row("x"), collected)
    messages = await collected.all(30)
    assert messages["bad"]["error_code"] == "poison_row"
    assert messages["good"]["status"] == "completed"


@pytest.mark.parametrize(("step", "wanted"), [(8, 128), (64, 128), (150, 300)])
async def test_an_engine_gets_the_rows_of_two_steps_where_nobody_says(
    start_host: StartHost, step: int, wanted: int
) -> None:
    host = await start_host(rows=None, sim_max_seqs=step)
    assert host.health().rows_limit == wanted
    never = Collected(1)
    for i in range(wanted):
        await asyncio.wait_for(host.submit(f"r{i}", row("<<slow:600000>>"), never), 10)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(host.submit("more", row("x"), never), 0.2)
    pid = host.health().pid
    assert pid is not None
    await eventually(lambda: host.health().figures.get("running") == step)
    os.kill(pid, signal.SIGKILL)  # by nobody we know: so many rows were too many for its memory
    await gone(pid)
    await eventually(lambda: host.health().up and host.health().restarts == 1)
    assert host.health().rows_limit == step // 2
    assert host.health().rows_in_flight == wanted


async def test_rows_of_a_large_step_all_end_in_an_engine_that_comes_back_with_a_small_one() -> None:
    start: dict[str, Any] = {"engine": "simulated", "model": "sim", "sim_max_seqs": 150, "sim_delay_ms": 500}
    host, collected = EngineHost(HostConfig(start=start)), Collected(301)
    try:
        assert (await host.start()).rows == 300
        for i in range(300):
            await host.submit(f"r{i}", row(f"p{i}"), collected)
        start |= {"sim_max_seqs": 64, "sim_delay_ms": 5}
        pid = host.health().pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)  # which is not how memory runs out
        await gone(pid)
        await eventually(lambda: host.health().up and host.health().restarts == 1)
        assert host.health().rows_limit == 128
        await asyncio.wait_for(host.submit("r300", row("p300"), collected), 20)
        messages = await collected.all()
        assert {message["status"] for message in messages.values()} == {"completed"}
    finally:
        await host.close()


async def test_an_engine_gets_one_canary_however_many_rows_are_aborted_meanwhile(
    start_host: StartHost, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    host = await start_host(sim_max_seqs=1, sim_delay_ms=1000, sim_log=str(log))
    collected, never = Collected(1), Collected(1)
    await host.submit("bad", row("<<crash>>"), collected)
    for i in range(20):
        await host.submit(f"r{i}", row("x"), never)
    await eventually(lambda: host.health().up and host.health().restarts == 2)  # it has to prove itself
    host.abort([f"r{i}" for i in range(20)])
    messages = await collected.all(30)
    assert messages["bad"]["error_code"] == "poison_row"
    assert log.read_text().split() == ["canary"]


async def test_a_child_that_is_busy_for_long_but_steps_is_no_hang(start_host: StartHost) -> None:
    host, collected = await start_host(rows=64, stall_timeout_s=1.0, sim_delay_ms=20), Collected(200)
    for i in range(200):
        await host.submit(f"r{i}", row("x"), collected)
    await collected.all()
    assert host.health().restarts == 0


@pytest.mark.parametrize("prompt", ["<<stall:1500>>" + "long " * 500, "<<compile:1500>>"])
async def test_a_step_of_many_tokens_may_take_longer_and_compiling_takes_what_it_takes(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    monkeypatch.setattr("pagemill.worker.engine_host.TICK_S", 0.1)
    host, collected = await start_host(rows=4, stall_timeout_s=0.3, stall_token_s=0.01), Collected(1)
    await host.submit("a", row(prompt), collected)
    assert (await collected.all())["a"]["status"] == "completed"
    assert host.health().restarts == 0


async def test_a_short_step_that_takes_as_long_is_a_hang(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill.worker.engine_host.TICK_S", 0.1)
    host, collected = await start_host(rows=4, stall_timeout_s=0.3, stall_token_s=0.01), Collected(1)
    await host.submit("a", row("<<stall:600000>>"), collected)
    assert (await collected.all())["a"]["error_code"] == "poison_row"


async def test_a_model_that_does_not_load_is_one_sentence() -> None:
    start = {"engine": "native", "model": "m", "model_source": "/nowhere/at/all"}
    host = EngineHost(HostConfig(start=start))
    with pytest.raises(ModelError, match="There is no model at /nowhere/at/all"):
        await host.start()
    with pytest.raises(ModelError):
        await host.broken()
    await host.close()


async def test_a_child_that_dies_while_loading_says_how() -> None:
    host = EngineHost(HostConfig(start={"engine": "simulated", "model": "sim", "sim_load_s": 60}))
    starting = asyncio.create_task(host.start())
    async with asyncio.timeout(10):
        while host._child is None or host._child._process is None:
            await asyncio.sleep(0.01)
    host._child.kill()
    with pytest.raises(ModelError, match="SIGKILL while loading"):
        await starting
    await host.close()


async def test_a_load_that_takes_too_long_ends() -> None:
    config = HostConfig(start={"engine": "simulated", "model": "sim", "sim_load_s": 60}, load_timeout_s=0.5)
    host = EngineHost(config)
    with pytest.raises(ModelError, match="did not load within"):
        await host.start()
    await host.close()


async def test_an_engine_that_keeps_dying_idle_is_the_workers_end(start_host: StartHost) -> None:
    host = await start_host()
    broken = asyncio.create_task(host.broken())
    async with asyncio.timeout(30):
        while not broken.done():
            pid = host.health().pid
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):  # the last kill has not been noticed yet
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.05)
    with pytest.raises(ModelError, match="times in a row"):
        await broken


async def test_closing_leaves_no_process(start_host: StartHost) -> None:
    host = await start_host()
    await host.submit("a", row("<<hang>>"), Collected(1))
    pid = host.health().pid
    assert pid is not None
    await host.close()
    assert not alive(pid)


OWNER = """
import asyncio
from pagemill.worker.engine_host import EngineHost, HostConfig
async def main():
    host = EngineHost(HostConfig(start={"engine": "simulated", "model": "sim"}))
    await host.start()
    await host.submit("a", {"prompt": "<<hang>>", "params": {}, "seed": 1}, print)
    print(host.health().pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_killed_owner_takes_its_engine_along() -> None:
    """Even one that hangs in a step: the thread at the control channel sees the end."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        pid = int(await asyncio.to_thread(owner.stdout.readline))
        assert alive(pid)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    await gone(pid)
