"""Steps that tests of the state share: a spec, a plan, a record, a job brought so far, a lease run out."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any, cast

from pagemill.jobs.spec import InputRef, JobSpec
from pagemill.jobs.state import State, new_nonce
from pagemill.jobs.status import JobStatus, Lease, Totals

TTL_MS = 60_000
MODEL = "org/tiny-model"


def make_spec(**changes: Any) -> JobSpec:
    given: dict[str, Any] = {
        "job": f"job-{uuid.uuid4().hex[:12]}",
        "model": MODEL,
        "created_at": time.time(),
        "input": InputRef(key="jobs/x/input.jsonl", size=100, etag="e"),
        "seed": 7,
    }
    return JobSpec(**{**given, **changes})


def make_plan(*rows: int, failed: int = 0, **more: Any) -> dict[str, Any]:
    """A plan of shards with so many rows each, and so many lines that were refused."""
    shards = [
        {"shard": number, "key": f"shards/{number}", "rows": count} for number, count in enumerate(rows)
    ]
    return {"total": sum(rows) + failed, "failed": failed, "fingerprint": None, "shards": shards, **more}


def counts(completed: int, failed: int = 0) -> dict[str, int]:
    return {
        "completed": completed,
        "failed": failed,
        "prompt_tokens": 10 * completed,
        "completion_tokens": 20 * completed,
        "cached_tokens": 3 * completed,
    }


def totals(completed: int, failed: int = 0) -> Totals:
    return Totals(**counts(completed, failed))


def make_record(shard: int, completed: int, failed: int = 0, fence: str = "f") -> dict[str, Any]:
    rows = completed + failed
    part = {"key": f"parts/{shard}-{fence}", "shard": shard, "rows": rows, **counts(completed, failed)}
    return {"shard": shard, "fence": fence, "part": part, "committed_at": 1.0}


def make_manifest(completed: int, failed: int = 0, state: str = "completed", **more: Any) -> dict[str, Any]:
    return {"state": state, "total": completed + failed, **counts(completed, failed), **more}


async def status(state: State, job: str) -> JobStatus:
    found = await state.status(job)
    assert found is not None
    return found


async def lease(state: State, model: str = MODEL, **asked: Any) -> Lease | None:
    given = {"worker": "w1", "nonce": new_nonce(), "ttl_ms": TTL_MS, "fingerprint": "weights-a"}
    return await state.lease(model, **{**given, **asked})


async def leased(state: State, model: str = MODEL, **asked: Any) -> Lease:
    got = await lease(state, model, **asked)
    assert got is not None
    return got


async def planned_job(state: State, *rows: int, failed: int = 0, **changes: Any) -> str:
    """A job whose plan counts already: its shards wait."""
    spec = make_spec(**changes)
    await state.create(spec, "file:///out")
    got = await leased(state, spec.model, job=spec.job, kinds=("plan",))
    await state.planned(spec.job, got.fence, make_plan(*rows, failed=failed))
    return spec.job


async def finalizing_job(state: State, **changes: Any) -> str:
    job = await planned_job(state, 2, **changes)
    await state.committed(job, 0, make_record(0, 2))
    return job


async def lapse(state: State, job: str, task: str) -> None:
    """As if the task's lease had run out a while ago, without waiting for it."""
    root = state.key(job)
    model = await text(state, f"{root}:meta", "model")
    holder = json.loads(await text(state, f"{root}:holders", task))
    holders: Any = {task: json.dumps({**holder, "ttl": 0})}
    await cast(Any, state.redis.hset(f"{root}:holders", mapping=holders))
    await state.redis.zadd(f"{root}:leases", {task: 1}, xx=True)
    await state.redis.zadd(f"{state.prefix}:model:{model}:due", {job: 1})


async def text(state: State, key: str, field: str) -> str:
    value = await cast(Any, state.redis.hget(key, field))
    return value.decode() if isinstance(value, bytes) else str(value or "")
