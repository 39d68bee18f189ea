"""What the worker's tests share: simulated engines, and a place to work in."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill.worker.engine_host import EngineHost, HostConfig

sys.path.insert(0, str(Path(__file__).parent / "support"))

from worker_place import Place, end_all

StartHost = Callable[..., Awaitable[EngineHost]]


@pytest.fixture
async def start_host() -> AsyncIterator[StartHost]:
    """Starts simulated engines: `await start_host(rows=…, sim_delay_ms=…)`; each is closed after the test."""
    hosts: list[EngineHost] = []

    async def start(
        *,
        rows: int | None = 64,
        size: int = 1 << 20,
        stall_timeout_s: float = 60,
        stall_token_s: float | None = None,
        quiet_s: float = 300,
        **sim: Any,
    ) -> EngineHost:
        config = HostConfig(
            start={"engine": "simulated", "model": "sim", **sim},
            rows=rows,
            bytes=size,
            load_timeout_s=20,
            stall_timeout_s=stall_timeout_s,
            stall_token_s=stall_token_s,
            quiet_s=quiet_s,
        )
        hosts.append(EngineHost(config))
        await hosts[-1].start()
        return hosts[-1]

    yield start
    for host in hosts:
        await host.close()


@pytest.fixture
def place(redis_url: str, tmp_path: Path) -> Iterator[Place]:
    """On the shared Redis and a folder of the test's own. Whatever it spawned is gone after the test."""
    here = Place(redis_url, str(tmp_path / "store"), tmp_path)
    yield here
    end_all(here)


@pytest.fixture
def alone(redis_server: Any, tmp_path: Path) -> Iterator[Place]:
    """On a Redis of its own, which the test kills or empties."""
    here = Place(redis_server.url, str(tmp_path / "store"), tmp_path)
    yield here
    end_all(here)
