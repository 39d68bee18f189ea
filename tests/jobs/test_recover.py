"""A job whose state Redis lost comes back from its objects: the same counts, nothing to do twice."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from fake_worker import answered, do, rows_of, seal_some, take, work
from job_steps import MODEL, make_spec

from pagemill.jobs import layout, recover
from pagemill.jobs.commit import write_segment
from pagemill.jobs.errors import JobConflict, JobNotFound, RedisUnavailable, StorageError
from pagemill.jobs.recover import restore, restore_all, unfinished
from pagemill.jobs.remembered import output_url
from pagemill.jobs.spec import InputRef, JobSpec
from pagemill.jobs.state import LeaseLost, State, new_nonce
from pagemill.jobs.status import JobStatus, Lease, Totals
from pagemill.jobs.storage import Storage, decide, read_json

LINES = b'{"prompt": "a"}\n{"prompt": "b"}\nnot json\n{"prompt": "c"}\n{"prompt": "d"}\n'


async def submit(state: State, storage: Storage, **changes: Any) -> JobSpec:
    """Four rows in two shards, and a line that is none."""
    job = make_spec().job
    key = layout.input(job)
    info = storage.put(key, LINES)
    source = InputRef(key=key, size=info.size, etag=info.etag, name="input.jsonl")
    spec = make_spec(job=job, input=source, shard_rows=2, **changes)
    storage.put(layout.job(job), spec.to_json())
    await state.create(spec, output_url(storage, job))
    return spec


async def flush(state: State) -> None:
    if keys := await state.redis.keys(f"{state.prefix}:*"):
        await state.redis.delete(*keys)


async def status(state: State, job: str) -> JobStatus:
    found = await state.status(job)
    assert found is not None
    return found


def lasting(found: JobStatus) -> dict[str, Any]:
    """What a rebuilt job must agree on with the lost one: everything but moments and live figures."""
    moments = {"started_at", "updated_at", "blocked_reason"}
    return {name: value for name, value in dataclasses.asdict(found).items() if name not in moments}


async def taken(state: State) -> Lease:
    lease = await take(state, MODEL)
    assert lease is not None
    return lease


async def test_a_lost_job_goes_on_where_its_objects_say_it_was(state: State, storage: Storage) -> None:
    spec = await submit(state, storage, expires_at=4_000_000_000.0)
    await work(state, storage, MODEL, tasks=2)  # the plan and shard 0
    old = await taken(state)
    await seal_some(state, storage, old, 1)
    before = await status(state, spec.job)
    assert (before.total, before.completed, before.failed, before.shards_done) == (5, 3, 1, 1)

    await flush(state)
    restored = await restore(state, storage, spec.job)
    assert (restored.rebuilt, restored.state, restored.epoch) == (True, "in_progress", 2)
    assert lasting(await status(state, spec.job)) == lasting(before)
    assert len(await state.segments(spec.job, 1)) == 1

    again = await taken(state)
    assert (again.task, again.epoch) == ("shard:1", 2)
    assert again.fence > old.fence
    assert again.fingerprint == "fp"
    await do(state, storage, again)
    await work(state, storage, MODEL)
    after = await status(state, spec.job)
    assert (after.state, after.completed, after.failed) == ("completed", 4, 1)


async def test_a_job_that_redis_knows_is_left_alone(state: State, local_storage: Storage) -> None:
    spec = await submit(state, local_storage)
    restored = await restore(state, local_storage, spec.job)
    assert (restored.rebuilt, restored.state) == (False, "validating")
    assert list(local_storage.list(f"{layout.root(spec.job)}epochs/")) == []


async def test_of_rebuilds_at_the_same_time_one_counts(state: State, local_storage: Storage) -> None:
    spec = await submit(state, local_storage)
    await work(state, local_storage, MODEL, tasks=2)
    before = await status(state, spec.job)
    await flush(state)
    restored = await asyncio.gather(*(restore(state, local_storage, spec.job) for _ in range(4)))
    assert sum(each.rebuilt for each in restored) == 1
    assert lasting(await status(state, spec.job)) == lasting(before)


async def test_every_loss_begins_an_epoch_of_its_own(state: State, local_storage: Storage) -> None:
    spec = await submit(state, local_storage)
    fences = []
    for epoch in (2, 3):
        await flush(state)
        assert (await restore(state, local_storage, spec.job)).epoch == epoch
        fences.append((await taken(state)).fence)
    assert fences == sorted(fences)


async def test_a_worker_of_an_earlier_epoch_is_refused(state: State, local_storage: Storage) -> None:
    spec = await submit(state, local_storage)
    await work(state, local_storage, MODEL, tasks=1)
    old = await taken(state)
    await flush(state)
    await restore(state, local_storage, spec.job)
    [renewed] = await state.renew("fake", [(old.job, old.task, old.fence)], 10_000)
    assert (renewed.ok, renewed.state) == (False, "in_progress")
    with pytest.raises(LeaseLost):
        await state.seal(spec.job, 0, old.fence, 0, {"key": "x"}, Totals(1))


async def test_nobody_leases_a_job_while_it_is_rebuilt(
    state: State, local_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = await submit(state, local_storage)
    await work(state, local_storage, MODEL, tasks=2)
    await flush(state)
    planned, seen = State.planned, []

    async def and_look(self: State, *args: Any) -> str:
        reply = await planned(self, *args)
        seen.append(await take(self, MODEL))
        return reply

    monkeypatch.setattr(State, "planned", and_look)
    await restore(state, local_storage, spec.job)
    assert seen == [None]
    assert (await taken(state)).task == "shard:1"


async def test_a_rebuild_that_died_leaves_a_job_that_goes_on(state: State, local_storage: Storage) -> None:
    spec = await submit(state, local_storage)
    await work(state, local_storage, MODEL, tasks=2)
    await flush(state)
    await state.create_held(spec, "out", epoch=2, token=new_nonce(), hold_ms=1)
    await asyncio.sleep(0.005)
    assert not (await restore(state, local_storage, spec.job)).rebuilt
    await work(state, local_storage, MODEL)
    after = await status(state, spec.job)
    assert (after.state, after.completed, after.failed) == ("completed", 4, 1)


async def test_a_lost_redis_does_not_resurrect_a_stopped_job(state: State, local_storage: Storage) -> None:
    spec = await submit(state, local_storage)
    await work(state, local_storage, MODEL, tasks=2)
    decide(local_storage, layout.stop(spec.job), {"reason": "cancelled", "at": 1.0})
    await flush(state)
    assert (await restore(state, local_storage, spec.job)).state == "cancelling"
    await work(state, local_storage, MODEL)
    after = await status(state, spec.job)
    assert (after.state, after.completed, after.failed) == ("cancelled", 2, 3)


async def test_a_job_stopped_before_its_plan_comes_back_draining(
    state: State, local_storage: Storage
) -> None:
    spec = await submit(state, local_storage)
    decide(local_storage, layout.stop(spec.job), {"reason": "expired", "at": 1.0})
    await flush(state)
    assert (await restore(state, local_storage, spec.job)).state == "expiring"
    await work(state, local_storage, MODEL)
    assert (await status(state, spec.job)).state == "expired"


async def test_a_finished_job_comes_back_finished(state: State, local_storage: Storage) -> None:
    spec = await submit(state, local_storage)
    await work(state, local_storage, MODEL)
    before = await status(state, spec.job)
    await flush(state)
    assert unfinished(local_storage) == []
    assert (await restore(state, local_storage, spec.job)).state == "completed"
    assert lasting(await status(state, spec.job)) == lasting(before)


async def test_rows_that_two_holders_sealed_count_once(state: State, local_storage: Storage) -> None:
    """A failover forgot the first holder's seal, so the second one sealed the same row again."""
    spec = await submit(state, local_storage)
    await work(state, local_storage, MODEL, tasks=1)
    first = await taken(state)
    await seal_some(state, local_storage, first, 1)
    second = await taken(state)
    _, rows = await rows_of(local_storage, second)
    write_segment(local_storage, spec.job, 0, second.fence, 0, [answered(row) for row in rows[:2]])
    await flush(state)
    await restore(state, local_storage, spec.job)
    found = await status(state, spec.job)
    assert (found.completed, found.prompt_tokens, found.completion_tokens) == (2, 6, 4)
    assert len(await state.segments(spec.job, 0)) == 2


async def test_two_segments_of_one_number_both_count(state: State, local_storage: Storage) -> None:
    """The holder put one, was not heard, and put another with what had finished since."""
    spec = await submit(state, local_storage)
    await work(state, local_storage, MODEL, tasks=1)
    held = await taken(state)
    _, rows = await rows_of(local_storage, held)
    for row in rows[:2]:
        write_segment(local_storage, spec.job, 0, held.fence, 0, [answered(row)])
    await flush(state)
    assert (await restore(state, local_storage, spec.job)).rebuilt
    assert (await status(state, spec.job)).completed == 2
    assert len(await state.segments(spec.job, 0)) == 2


async def test_all_unfinished_jobs_of_a_store_are_restored(state: State, local_storage: Storage) -> None:
    finished = await submit(state, local_storage)
    await work(state, local_storage, MODEL)
    running, deleted = await submit(state, local_storage), await submit(state, local_storage)
    local_storage.put(layout.tombstone(deleted.job), b"{}")
    await flush(state)
    restored = await restore_all(state, local_storage)
    assert [(each.job, each.rebuilt) for each in restored] == [(running.job, True)]
    assert await state.status(finished.job) is None
    with pytest.raises(JobConflict, match="deleted"):
        await restore(state, local_storage, deleted.job)


async def test_a_job_that_nobody_knows_is_not_found(state: State, local_storage: Storage) -> None:
    with pytest.raises(JobNotFound, match="neither in this Redis nor in"):
        await restore(state, local_storage, "job-nobody-knows")


async def test_a_commit_record_that_cannot_be_read_fails_the_rebuild_in_one_sentence(
    state: State, local_storage: Storage
) -> None:
    spec = await submit(state, local_storage)
    await work(state, local_storage, MODEL, tasks=2)
    await flush(state)
    key = layout.commit(spec.job, 0)
    assert read_json(local_storage, key) is not None
    local_storage.delete([key])
    local_storage.put(key, b"{")
    with pytest.raises(StorageError):
        await restore(state, local_storage, spec.job)


@pytest.mark.parametrize("instead", ["nothing", "another rebuild"])
async def test_a_redis_that_forgets_again_in_the_middle_of_a_rebuild_is_told_again(
    state: State, local_storage: Storage, monkeypatch: pytest.MonkeyPatch, instead: str
) -> None:
    spec = await submit(state, local_storage)
    await work(state, local_storage, MODEL, tasks=2)
    before = lasting(await status(state, spec.job))
    real, left = recover._tell, [1]

    async def forgetful(*args: Any) -> None:
        if left[0]:
            left[0] -= 1
            await flush(state)
            if instead == "another rebuild":
                output = output_url(local_storage, spec.job)
                await state.create_held(spec, output, epoch=9, token="theirs", hold_ms=1)
                await real(state, local_storage, spec.job, "theirs")
                await state.hold(spec.job, "theirs", 0)
        await real(*args)

    monkeypatch.setattr(recover, "_tell", forgetful)
    await flush(state)
    restored = await restore(state, local_storage, spec.job)
    assert restored.rebuilt == (instead == "nothing")
    assert lasting(await status(state, spec.job)) == before
    left[0] = 10**6
    await flush(state)
    if instead == "nothing":
        with pytest.raises(RedisUnavailable, match=r"loses job .* again"):
            await restore(state, local_storage, spec.job)


async def test_a_flush_between_two_looks_at_the_protocol_is_no_mismatch(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = state.redis.get
    left = [2]

    async def flushed(name: str) -> Any:
        if left[0]:
            left[0] -= 1
            await flush(state)
        return await real(name)

    monkeypatch.setattr(state.redis, "get", flushed)
    await state.check_protocol()
    assert left == [0]
