"""The command as tests call it: what it said and ended with; a job that is submitted, and done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fake_worker import work

from pagemill.jobs.client import Client


@dataclass
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


def finish(redis_url: str, store: Path, model: str, tasks: int = 100) -> None:
    async def go() -> None:
        async with Client(redis_url, str(store)) as client:
            await work(await client.state(), client.storage, model, tasks=tasks)

    asyncio.run(go())


def submitted(run: Run, prompts: Path, model: str, *more: object) -> str:
    done = run("submit", prompts, "--model", model, *more)
    assert done.code == 0, done.err
    return done.out.strip()
