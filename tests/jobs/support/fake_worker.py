"""A worker of twenty lines for tests of the client: it answers every row at once, by the real protocol."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from pagemill.jobs import layout
from pagemill.jobs.client import Client
from pagemill.jobs.commit import commit_shard, write_segment
from pagemill.jobs.parquet import ResultRow
from pagemill.jobs.plan import read_shard
from pagemill.jobs.row import Row
from pagemill.jobs.settle import settle
from pagemill.jobs.state import State, new_nonce
from pagemill.jobs.status import Lease, Totals, WorkerInfo
from pagemill.jobs.storage import Storage, read_json

TTL_MS = 30_000


def unique(name: str) -> str:
    """A model or job that no other test uses; they share one Redis."""
    return f"{name}-{uuid.uuid4().hex[:12]}"


def answer(row: Row) -> str:
    return f"answer to {row.prompt or row.messages or row.prompt_token_ids}"


def answered(row: Row, text: Callable[[Row], str] = answer) -> ResultRow:
    return ResultRow(
        row.row_index,
        row.custom_id,
        row.line,
        "completed",
        row.kind,
        text=text(row),
        finish_reason="stop",
        prompt_tokens=3,
        completion_tokens=2,
        seed=row.seed,
        attempt=1,
        model="fake",
    )


async def take(state: State, model: str, **more: Any) -> Lease | None:
    return await state.lease(model, worker="fake", nonce=new_nonce(), ttl_ms=TTL_MS, fingerprint="fp", **more)


async def rows_of(storage: Storage, lease: Lease) -> tuple[dict[str, Any], list[Row]]:
    plan = await asyncio.to_thread(read_json, storage, layout.plan(lease.job))
    assert plan is not None
    entry = next(entry for entry in plan["shards"] if entry["shard"] == lease.shard)
    return entry, await asyncio.to_thread(read_shard, storage, entry)


async def work(state: State, storage: Storage, model: str, *, tasks: int = 1_000) -> int:
    """Does up to `tasks` tasks of a model, until there is none; returns how many there were."""
    done = 0
    while done < tasks and (lease := await take(state, model)) is not None:
        await do(state, storage, lease)
        done += 1
    return done


async def finish(client: Client, model: str) -> None:
    """Does all that there is to do of a model."""
    await work(await client.state(), client.storage, model)


async def do(state: State, storage: Storage, lease: Lease) -> None:
    if lease.kind != "shard" or lease.stop is not None:
        await settle(state, storage, lease, fingerprint="fp")
        return
    entry, rows = await rows_of(storage, lease)
    record = await asyncio.to_thread(
        commit_shard, storage, lease.job, entry, fence=lease.fence, segments=[],
        rows=[answered(row) for row in rows], expected_row_indexes={row.row_index for row in rows},
    )  # fmt: skip
    assert lease.shard is not None
    await state.committed(lease.job, lease.shard, record)


async def seal_some(state: State, storage: Storage, lease: Lease, count: int) -> None:
    """The first rows of a shard, sealed; then the shard is handed back, as a worker that leaves does."""
    _, rows = await rows_of(storage, lease)
    assert lease.shard is not None
    finished = [answered(row) for row in rows[:count]]
    segment = await asyncio.to_thread(
        write_segment, storage, lease.job, lease.shard, lease.fence, 0, finished
    )
    await state.seal(lease.job, lease.shard, lease.fence, 0, segment, Totals(count, 0, 3 * count, 2 * count))
    await state.release(lease.job, lease.task, lease.fence)


async def say_alive(state: State, model: str) -> str:
    """A heartbeat of a worker that serves the model."""
    name = unique("worker")
    await state.heartbeat(WorkerInfo(worker=name, state="ready", models=(model,)), 60_000)
    return name
