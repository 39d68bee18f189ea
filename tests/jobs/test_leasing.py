"""Who gets which task: order, fairness, refusals, fences, takeovers, and leases past their deadline."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any, cast

import pytest
from job_steps import (
    MODEL,
    TTL_MS,
    counts,
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
from pagemill.jobs.status import Lease, Totals, WorkerInfo


async def blocked_reason(state: State, job: str) -> str:
    found = await state.status(job)
    assert found is not None
    return found.blocked_reason


# one lease


async def test_the_same_nonce_gets_the_same_lease(state: State) -> None:
    await planned_job(state, 5, 5)
    first = await leased(state, nonce="n1")
    assert await leased(state, nonce="n1") == first
    assert (await leased(state, nonce="n2")).task == "shard:1"


async def test_a_nonce_whose_lease_ran_out_gets_it_back_while_nobody_took_the_task(state: State) -> None:
    await planned_job(state, 5)
    first = await leased(state, nonce="n1")
    await lapse(state, first.job, first.task)
    assert await state.runnable(MODEL) == 1
    assert await leased(state, nonce="n1") == first
    assert await state.runnable(MODEL) == 0


async def test_a_nonce_whose_task_went_on_gets_nothing(state: State) -> None:
    job = await planned_job(state, 5, 5)
    first = await leased(state, nonce="n1")
    await lapse(state, first.job, first.task)
    await leased(state, nonce="n2", worker="w2")
    assert await lease(state, nonce="n1") is None
    await state.committed(job, 0, make_record(0, 5))
    assert await lease(state, nonce="n2", worker="w2") is None


async def test_a_lease_tells_what_its_holder_must_know(state: State) -> None:
    spec = make_spec()
    await state.create(spec, "out")
    held = await leased(state)
    assert held == Lease(
        job=spec.job,
        task="plan",
        kind="plan",
        shard=None,
        fence=held.fence,
        epoch=1,
        state="validating",
        stop=None,
        strikes=0,
        attempt=1,
        more=False,
        ttl_ms=TTL_MS,
        fingerprint="",
    )
    await state.planned(spec.job, held.fence, make_plan(5, 5))
    held = await leased(state)
    assert (held.kind, held.shard, held.more, held.fingerprint) == ("shard", 0, True, "weights-a")


async def test_an_ended_or_unknown_job_leases_nothing(state: State) -> None:
    job = await finalizing_job(state)
    held = await leased(state)
    await state.finalized(job, make_manifest(2))
    assert await lease(state) is None
    assert await lease(state, job=job) is None
    assert await lease(state, job="job-nobody-knows") is None
    [renewed] = await state.renew("w1", [(job, held.task, held.fence)], TTL_MS)
    assert (renewed.ok, renewed.state) == (False, "completed")


async def test_two_workers_never_hold_one_task(state: State) -> None:
    await planned_job(state, *[1] * 20)
    asked = [lease(state, worker=f"w{n}") for n in range(40)]
    got = [held for held in await asyncio.gather(*asked) if held]
    assert sorted(cast(int, held.shard) for held in got) == list(range(20))


# fences


async def test_fences_grow_strictly_and_sort_as_text(state: State) -> None:
    await planned_job(state, 5)
    fences = []
    for _ in range(5):
        held = await leased(state)
        fences.append(held.fence)
        await lapse(state, held.job, held.task)
    assert fences == sorted(set(fences))
    assert fences[0].startswith("000001.")


async def test_a_fence_exceeds_its_forerunner_even_when_the_clock_went_back(state: State) -> None:
    job = await planned_job(state, 5)
    ahead = "999999999999999"
    await cast(Any, state.redis.hset(f"{state.key(job)}:fences", "shard:0", "999999999999998"))
    assert (await leased(state)).fence == f"000001.{ahead}"


async def test_a_fence_exceeds_that_of_a_lease_which_redis_forgot(state: State) -> None:
    """A failover loses the last second: the fence given in it must not be given again."""
    job = await planned_job(state, 5)
    lost = await leased(state)
    for key in ("fences", "holders", "leases", "attempts"):
        await state.redis.delete(f"{state.key(job)}:{key}")
    await state.redis.zadd(f"{state.key(job)}:pending", {"shard:0": 2})
    await state.hold(job, "", 0)  # brings the indexes up to date
    await asyncio.sleep(0.002)
    assert (await leased(state)).fence > lost.fence


# renew, release


async def test_renewing_keeps_a_lease_and_may_be_repeated(state: State) -> None:
    job = await planned_job(state, 5)
    held = await leased(state)
    for _ in range(2):
        [renewed] = await state.renew("w1", [(job, held.task, held.fence)], TTL_MS)
        assert (renewed.ok, renewed.state, renewed.stop) == (True, "in_progress", None)
    assert await state.renew("w1", [], TTL_MS) == []


async def test_renewing_a_lease_that_ran_out_succeeds_until_somebody_took_the_task(state: State) -> None:
    job = await planned_job(state, 5)
    held = await leased(state)
    await lapse(state, held.job, held.task)
    assert await state.runnable(MODEL) == 1  # swept into pending
    [renewed] = await state.renew("w1", [(job, held.task, held.fence)], TTL_MS)
    assert renewed.ok
    assert await lease(state, worker="w2") is None
    await lapse(state, held.job, held.task)
    taken = await leased(state, worker="w2")
    assert taken.task == held.task
    [renewed] = await state.renew("w1", [(job, held.task, held.fence)], TTL_MS)
    assert not renewed.ok


async def test_a_holder_whose_lease_ran_out_may_still_seal_while_nobody_took_the_task(state: State) -> None:
    job = await planned_job(state, 5)
    held = await leased(state)
    await lapse(state, held.job, held.task)
    await state.runnable(MODEL)
    assert (await state.seal(job, 0, held.fence, 1, {"key": "a"}, Totals(2))).counted


async def test_one_call_renews_leases_of_several_jobs_and_judges_each_alone(state: State) -> None:
    one, two = await planned_job(state, 5), await planned_job(state, 5)
    held = [await leased(state), await leased(state)]
    assert {each.job for each in held} == {one, two}
    await state.stop(two, "cancelled")
    asked = [(each.job, each.task, each.fence) for each in held]
    renewed = await state.renew("w1", [*asked, (one, "shard:0", "000001.0"), ("nobody", "plan", "f")], TTL_MS)
    by_job = dict(zip([each.job for each in held], renewed, strict=False))
    assert (by_job[one].ok, by_job[one].stop) == (True, None)
    assert (by_job[two].ok, by_job[two].state, by_job[two].stop) == (True, "cancelling", "cancelled")
    assert [(r.ok, r.state) for r in renewed[2:]] == [(False, "in_progress"), (False, "")]


async def test_a_task_handed_back_is_free_at_once_and_nobody_is_blamed(state: State) -> None:
    job = await planned_job(state, 5)
    held = await leased(state)
    assert await state.release(job, held.task, held.fence)
    assert not await state.release(job, held.task, held.fence)
    again = await leased(state, worker="w2")
    assert (again.task, again.strikes, again.attempt) == (held.task, 0, 1)
    assert again.fence > held.fence
    assert not await state.release(job, held.task, held.fence)
    assert not await state.release("job-nobody-knows", "plan", "f")


async def test_seven_deploys_in_one_job_burn_no_try(state: State) -> None:
    job = await planned_job(state, 5)
    for _ in range(7):
        held = await leased(state)
        assert (held.attempt, held.strikes) == (1, 0)
        await state.release(job, held.task, held.fence)


# takeovers and strikes


async def test_a_lease_that_ends_with_nothing_to_show_is_a_strike(state: State) -> None:
    await planned_job(state, 5)
    for strikes in range(3):
        held = await leased(state, worker=f"w{strikes}")
        assert (held.strikes, held.attempt) == (strikes, strikes + 1)
        await lapse(state, held.job, held.task)


async def test_a_lease_that_sealed_something_is_no_strike_but_wipes_none_away(state: State) -> None:
    job = await planned_job(state, 5)
    await lapse(state, (await leased(state)).job, "shard:0")
    held = await leased(state)
    assert held.strikes == 1
    await state.seal(job, 0, held.fence, 1, {"key": "a"}, Totals(**counts(2)))
    await lapse(state, held.job, held.task)
    assert (await leased(state)).strikes == 1


async def test_a_takeover_tells_watchers_who_was_lost(state: State) -> None:
    job = await planned_job(state, 5)
    held = await leased(state, worker="w1")
    await lapse(state, held.job, held.task)
    await leased(state, worker="w2")
    lost = [
        event.data
        for event in await state.events(job)
        if event.kind == "lost" and event.data["task"] != "plan"
    ]
    assert lost == [{"task": "shard:0", "worker": "w1", "fence": held.fence}]


async def test_nothing_is_taken_over_within_one_ttl_of_a_restart(state: State) -> None:
    """Leases that ran out while Redis was down could not be renewed; their holders get one more ttl."""
    job = await planned_job(state, 5)
    held = await leased(state)
    uptime = (await state.facts()).uptime_seconds
    holder = {"fence": held.fence, "worker": "w1", "nonce": "n", "sealed": 0, "ttl": (uptime + 100) * 1000}
    await cast(Any, state.redis.hset(f"{state.key(job)}:holders", "shard:0", json.dumps(holder)))
    await state.redis.zadd(f"{state.key(job)}:leases", {"shard:0": 1})
    await state.redis.zadd(f"{state.prefix}:model:{MODEL}:due", {job: 1})
    assert await lease(state, worker="w2") is None
    [renewed] = await state.renew("w1", [(job, held.task, held.fence)], TTL_MS)
    assert renewed.ok
    await lapse(state, held.job, held.task)
    assert (await leased(state, worker="w2")).task == "shard:0"


async def test_one_due_job_is_swept_whatever_the_model_asks_first(state: State) -> None:
    """More leases ran out at once than one sweep looks at."""
    jobs = [await planned_job(state, 1, 1) for _ in range(20)]
    held = [await leased(state) for _ in range(40)]
    for each in held:
        await lapse(state, each.job, each.task)
    seen = Counter()
    for _ in range(40):
        seen[(await leased(state, worker="w2")).job] += 1
    assert seen == Counter(dict.fromkeys(jobs, 2))


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


# a job that is being rebuilt


async def test_a_held_job_is_leased_only_when_the_hold_ends(state: State) -> None:
    spec = make_spec()
    await state.create_held(spec, "out", epoch=2, token="mine", hold_ms=60_000)
    assert await lease(state) is None
    assert await lease(state, job=spec.job) is None
    for _ in range(2):
        await state.hold(spec.job, "mine", 0)
    assert (await leased(state)).fence.startswith("000002.")


async def test_a_hold_that_nobody_lengthens_runs_out(state: State) -> None:
    spec = make_spec()
    await state.create_held(spec, "out", epoch=2, token="mine", hold_ms=1)
    await asyncio.sleep(0.005)
    assert (await leased(state)).kind == "plan"


@pytest.mark.parametrize("hold_ms", [60_000, 0])
async def test_nobody_works_on_a_job_through_another_ones_rebuild(state: State, hold_ms: int) -> None:
    from pagemill.jobs.state import LeaseLost

    spec = make_spec()
    await state.create_held(spec, "out", epoch=2, token="mine", hold_ms=60_000)
    await state.planned(spec.job, "", make_plan(5))
    with pytest.raises(LeaseLost):
        await state.hold(spec.job, "theirs", hold_ms)
    with pytest.raises(LeaseLost):
        await state.reseal(spec.job, 0, "000001.5", 1, {"key": "a"}, Totals(2), token="theirs")
    for _ in range(2):
        await state.reseal(spec.job, 0, "000001.5", 1, {"key": "a"}, Totals(2), token="mine")
    found = await state.status(spec.job)
    assert found is not None
    assert found.completed == 2


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
