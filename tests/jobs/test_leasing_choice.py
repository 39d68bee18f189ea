"""Who gets which task: refusals, order and fairness; and what is asked of the state as a whole."""

from __future__ import annotations

import asyncio
from typing import cast

from job_steps import (
    MODEL,
    finalizing_job,
    lapse,
    lease,
    leased,
    make_manifest,
    make_plan,
    make_record,
    make_spec,
    planned_job,
)

from pagemill.jobs.state import State, new_nonce
from pagemill.jobs.status import Totals, WorkerInfo


async def blocked_reason(state: State, job: str) -> str:
    found = await state.status(job)
    assert found is not None
    return found.blocked_reason


# refusals


async def test_other_weights_are_refused_and_the_job_says_so(state: State) -> None:
    job = await planned_job(state, 5, 5)
    first = await leased(state, fingerprint="weights-a")
    await state.release(job, first.task, first.fence)
    assert await lease(state, worker="w2", fingerprint="weights-b") is None
    reason = await blocked_reason(state, job)
    assert "w2" in reason
    assert "other weights (weights-b) than the job began with (weights-a)" in reason
    assert (await leased(state, fingerprint="weights-a")).fingerprint == "weights-a"
    assert await blocked_reason(state, job) == ""


async def test_refused_workers_that_ask_again_and_again_are_one_event(state: State) -> None:
    job = await planned_job(state, 5)
    await state.release(job, "shard:0", (await leased(state)).fence)
    for worker in ("w2", "w3", "w2", "w3"):
        assert await lease(state, worker=worker, fingerprint="weights-b") is None
        assert f"worker {worker} is refused" in await blocked_reason(state, job)
    refused = [event for event in await state.events(job) if "refused" in event.data.get("reason", "")]
    assert len(refused) == 1


async def test_a_refusal_does_not_hide_what_a_worker_said(state: State) -> None:
    job = await planned_job(state, 5)
    await state.release(job, "shard:0", (await leased(state)).fence)
    await state.block(job, "The store refuses.")
    assert await lease(state, worker="w2", fingerprint="weights-b") is None
    assert await blocked_reason(state, job) == "The store refuses."


async def test_a_refusal_is_not_told_while_others_work_on_the_job(state: State) -> None:
    job = await planned_job(state, 5, 5)
    await leased(state, fingerprint="weights-a")
    assert await lease(state, worker="w2", fingerprint="weights-b") is None
    assert await blocked_reason(state, job) == ""


async def test_the_fingerprint_of_the_plan_is_the_jobs(state: State) -> None:
    spec = make_spec()
    await state.create(spec, "out")
    held = await leased(state, fingerprint="weights-b")
    await state.planned(spec.job, held.fence, make_plan(5) | {"fingerprint": "weights-a"})
    assert await lease(state, fingerprint="weights-b") is None
    assert (await leased(state, fingerprint="weights-a")).fingerprint == "weights-a"


async def test_a_worker_without_a_model_gets_only_what_needs_no_engine(state: State) -> None:
    spec = make_spec()
    await state.create(spec, "out")
    held = await leased(state, fingerprint=None)
    assert held.kind == "plan"
    await state.planned(spec.job, held.fence, make_plan(5))
    assert await lease(state, fingerprint=None) is None
    await state.stop(spec.job, "cancelled")
    assert (await leased(state, fingerprint=None)).task == "shard:0"
    await state.committed(spec.job, 0, make_record(0, 0, 5))
    assert (await leased(state, fingerprint=None)).kind == "finalize"


async def test_shards_of_a_stopped_job_go_to_workers_with_any_weights(state: State) -> None:
    job = await planned_job(state, 5, 5)
    await leased(state, fingerprint="weights-a")
    await state.stop(job, "expired")
    assert (await leased(state, fingerprint="weights-b")).stop == "expired"


async def test_a_context_smaller_than_declared_is_refused_and_the_job_says_so(state: State) -> None:
    job = await planned_job(state, 5, context=4096)
    assert await lease(state, context=2048) is None
    reason = await blocked_reason(state, job)
    assert "a context of 2048 tokens, the job declares 4096" in reason
    assert (await leased(state, context=4096)).task == "shard:0"


async def test_a_refused_job_does_not_stand_in_the_way_of_the_next(state: State) -> None:
    await planned_job(state, 5, context=4096, priority=5)
    fits = await planned_job(state, 5)
    assert (await leased(state, context=2048)).job == fits


async def test_a_model_serves_only_its_own_jobs(state: State) -> None:
    job = await planned_job(state, 5)
    assert await lease(state, "another-model") is None
    assert await lease(state, "another-model", job=job) is None
    await state.stop(job, "cancelled")
    assert (await leased(state, "another-model", job=job)).task == "shard:0"


async def test_kinds_that_were_not_asked_for_are_left(state: State) -> None:
    job = await planned_job(state, 5)
    spec = make_spec()
    await state.create(spec, "out")
    assert await lease(state, kinds=("finalize",)) is None
    assert (await leased(state, kinds=("plan", "finalize"))).job == spec.job
    assert (await leased(state, kinds=("shard",))).job == job


# order and fairness


async def test_higher_priority_goes_first_and_any_size_counts(state: State) -> None:
    jobs = {p: await planned_job(state, 1, 1, priority=p) for p in (0, 7, -1_000_000, 500, 1_000_000)}
    order = [(await leased(state)).job for _ in range(10)]
    assert order == [jobs[p] for p in (1_000_000, 1_000_000, 500, 500, 7, 7, 0, 0, -1_000_000, -1_000_000)]


async def test_jobs_of_one_priority_share_by_live_leases(state: State) -> None:
    huge = await planned_job(state, *[1] * 50)
    for _ in range(6):
        await leased(state)
    small = await planned_job(state, *[1] * 4)
    assert [(await leased(state)).job for _ in range(4)] == [small] * 4
    assert (await leased(state)).job == huge


async def test_among_equals_the_one_that_waited_longest_goes_first(state: State) -> None:
    jobs = [await planned_job(state, *[1] * 9) for _ in range(3)]
    rounds = []
    for _ in range(6):
        held = await leased(state)
        rounds.append(held.job)
        await state.committed(held.job, cast(int, held.shard), make_record(cast(int, held.shard), 1))
    assert rounds[:3] == rounds[3:]
    assert sorted(rounds[:3]) == sorted(jobs)


async def test_within_a_job_shards_go_by_number(state: State) -> None:
    await planned_job(state, *[1] * 12)
    assert [(await leased(state)).shard for _ in range(12)] == list(range(12))


async def test_a_jobs_cap_on_leases_is_kept(state: State) -> None:
    job = await planned_job(state, 1, 1, 1, max_shards=2)
    first, _ = await leased(state), await leased(state)
    assert await lease(state) is None
    assert await state.runnable(MODEL) == 0
    await state.committed(job, cast(int, first.shard), make_record(cast(int, first.shard), 1))
    assert await state.runnable(MODEL) == 1
    assert (await leased(state)).shard == 2


async def test_a_job_at_its_cap_leaves_room_for_others_and_its_stop_lifts_it(state: State) -> None:
    capped = await planned_job(state, 1, 1, 1, max_shards=1, priority=9)
    other = await planned_job(state, 1)
    assert [(await leased(state)).job for _ in range(2)] == [capped, other]
    await state.stop(capped, "cancelled")
    assert [(await leased(state)).job for _ in range(2)] == [capped, capped]


async def test_a_lease_for_starved_jobs_only_finds_those_nobody_works_on(state: State) -> None:
    await planned_job(state, 1, 1, priority=3)
    await leased(state)
    assert await lease(state, starved_only=True) is None
    high, low = await planned_job(state, 1, 1, priority=3), await planned_job(state, 1, 1, priority=-3)
    assert (await leased(state, starved_only=True)).job == high
    assert (await leased(state, starved_only=True)).job == low
    assert await lease(state, starved_only=True) is None
    assert await lease(state, starved_only=True, job=low) is None


async def test_more_says_whether_another_task_is_ready(state: State) -> None:
    await planned_job(state, 1, 1)
    assert [(await leased(state)).more for _ in range(2)] == [True, False]


# what the sweeper asks


async def test_runnable_counts_ready_tasks_up_to_a_limit(state: State) -> None:
    assert await state.runnable(MODEL) == 0
    await planned_job(state, *[1] * 8)
    await planned_job(state, *[1] * 8, max_shards=3)
    assert await state.runnable(MODEL) == 11
    assert await state.runnable(MODEL, limit=5) == 5
    held = await leased(state)
    await lapse(state, held.job, held.task)
    assert await state.runnable(MODEL) == 11


async def test_jobs_past_their_deadline_are_overdue_until_they_drain(state: State) -> None:
    late = await planned_job(state, 1, expires_at=1000.0)
    await planned_job(state, 1, expires_at=4_000_000_000.0)
    await planned_job(state, 1)
    for _ in range(2):
        assert await state.overdue() == [late]
    await state.stop(late, "expired")
    assert await state.overdue() == []


async def test_a_job_that_finalizes_is_not_overdue(state: State) -> None:
    job = await finalizing_job(state, expires_at=1000.0)
    assert await state.overdue() == []
    await state.finalized(job, make_manifest(2))
    assert await state.overdue() == []


async def test_models_with_unfinished_jobs_are_known(state: State) -> None:
    one = await planned_job(state, 1, model="one")
    two = await finalizing_job(state, model="two")
    assert await state.models() == ["one", "two"]
    assert await state.unfinished("one") == [one]
    await state.finalized(two, make_manifest(2))
    assert await state.models() == ["one"]


# what is asked of the state as a whole


async def test_jobs_are_listed_newest_first_and_filtered(state: State) -> None:
    jobs = [await planned_job(state, 1, created_at=100.0 + n, model=f"m{n % 2}") for n in range(5)]
    await state.stop(jobs[0], "cancelled")
    assert [job.job for job in await state.list_jobs()] == jobs[::-1]
    assert [job.job for job in await state.list_jobs(2, 1)] == [jobs[3], jobs[2]]
    assert [job.job for job in await state.list_jobs(model="m1")] == [jobs[3], jobs[1]]
    assert [job.job for job in await state.list_jobs(state="cancelling")] == [jobs[0]]


async def test_a_job_whose_keys_expired_leaves_the_list(state: State) -> None:
    jobs = [await planned_job(state, 1, created_at=100.0 + n) for n in range(3)]
    await state.redis.delete(state.key(jobs[1]))
    assert [job.job for job in await state.list_jobs()] == [jobs[2], jobs[0]]
    assert await state.redis.zcard(f"{state.prefix}:jobs") == 2


async def test_events_are_read_on_from_where_one_was(state: State) -> None:
    job = await planned_job(state, 5)
    first = await state.events(job)
    assert [event.kind for event in first][:1] == ["state"]
    waiting = asyncio.create_task(state.events(job, first[-1].id, block_ms=4000))
    await asyncio.sleep(0.01)
    held = await leased(state)
    await state.seal(job, 0, held.fence, 1, {"key": "a"}, Totals(2))
    [event] = await waiting
    assert (event.kind, event.data) == ("sealed", {"shard": "0", "completed": "2", "failed": "0"})
    assert await state.events(job, event.id, block_ms=1) == []


async def test_the_event_stream_is_capped(state: State) -> None:
    job = await planned_job(state, 5000)
    held = await leased(state)
    for seq in range(1, 1300):
        await state.seal(job, 0, held.fence, seq, {"n": seq}, Totals(seq))
    assert await state.redis.xlen(f"{state.key(job)}:events") < 1200


async def test_a_worker_may_serve_models_with_any_name(state: State) -> None:
    odd = "Org/Model name: {v1} ünï"
    job = await planned_job(state, 1, model=odd)
    await state.heartbeat(WorkerInfo("w1", models=(odd,)), 60_000)
    assert (await leased(state, odd, nonce=new_nonce())).job == job


async def test_an_avoided_job_does_not_stand_in_the_way_of_the_next(state: State) -> None:
    first, second = make_spec(priority=5), make_spec()
    for spec in (first, second):
        await state.create(spec, "out")
    taken = await lease(state, avoid=[first.job])
    assert taken is not None
    assert taken.job == second.job
    assert await lease(state, avoid=[first.job, second.job]) is None
    assert await lease(state, avoid=[first.job], job=first.job) is None
    taken = await lease(state)
    assert taken is not None
    assert taken.job == first.job
