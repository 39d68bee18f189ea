"""What a lease is: its nonce and fence, renewing and handing back, and takeovers past its deadline."""

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

from pagemill.jobs.state import State
from pagemill.jobs.status import Lease, Totals

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
