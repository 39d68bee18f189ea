"""A job's life in the state machine: each verb runs twice and counts once, and each refuses what it must."""

from __future__ import annotations

from typing import Any, cast

import pytest
from job_steps import (
    MODEL,
    TTL_MS,
    finalizing_job,
    lapse,
    lease,
    leased,
    make_manifest,
    make_plan,
    make_record,
    make_spec,
    planned_job,
    status,
    totals,
)

from pagemill.jobs.errors import JobConflict, JobNotFound
from pagemill.jobs.state import State
from pagemill.jobs.status import StopReason

# create


async def test_a_new_job_has_every_public_field_from_the_start(state: State) -> None:
    spec = make_spec(expires_at=2_000_000_000.0)
    created = await state.create(spec, "s3://out")
    assert not created.existed
    fields = await cast(Any, state.redis.hgetall(state.key(spec.job)))
    assert {name.decode() for name in fields} == {
        "state", "blocked_reason", "model", "total", "completed", "failed", "prompt_tokens",
        "completion_tokens", "cached_tokens", "shards_total", "shards_done", "created_at", "started_at",
        "updated_at", "finished_at", "expires_at", "output", "error_code", "error_message", "rows_running",
        "workers_active", "tokens_per_second", "eta_seconds",
    }  # fmt: skip
    found = await status(state, spec.job)
    assert (found.state, found.total, found.output) == ("validating", 0, "s3://out")
    assert (found.started_at, found.expires_at) == (None, 2_000_000_000.0)


async def test_creating_the_same_job_twice_finds_it(state: State) -> None:
    job = await planned_job(state, 4, job=(spec := make_spec()).job)
    assert (await state.create(spec, "elsewhere")).existed
    found = await status(state, job)
    assert (found.state, found.output) == ("in_progress", "file:///out")


async def test_creating_another_job_under_a_known_id_is_a_conflict(state: State) -> None:
    spec = make_spec()
    await state.create(spec, "out")
    with pytest.raises(JobConflict, match="other input, model or parameters"):
        await state.create(spec.model_copy(update={"model": "another"}), "out")


async def test_the_id_of_an_ended_job_is_still_known_and_that_of_a_deleted_one_refused(state: State) -> None:
    spec = make_spec()
    job = await finalizing_job(state, job=spec.job)
    with pytest.raises(JobConflict, match="finalizing"):
        await state.delete(job)
    await state.finalized(job, make_manifest(2))
    assert (await state.create(spec, "out")).existed
    await state.delete(job)
    await state.delete(job)
    assert await state.status(job) is None
    assert await state.list_jobs() == []
    with pytest.raises(JobConflict, match="was deleted"):
        await state.create(spec, "out")


async def test_deleting_an_unknown_job_says_so(state: State) -> None:
    with pytest.raises(JobNotFound):
        await state.delete("job-nobody-knows")


# planned


async def test_a_plan_counts_once(state: State) -> None:
    spec = make_spec()
    await state.create(spec, "out")
    held = await leased(state)
    for _ in range(2):
        assert await state.planned(spec.job, held.fence, make_plan(3, 4, failed=2)) == "in_progress"
    found = await status(state, spec.job)
    assert (found.total, found.completed, found.failed, found.shards_total) == (9, 0, 2, 2)
    assert await state.runnable(MODEL) == 2


async def test_the_plan_of_a_planner_that_lost_its_lease_is_adopted_all_the_same(state: State) -> None:
    spec = make_spec()
    await state.create(spec, "out")
    first = await leased(state)
    await lapse(state, first.job, first.task)
    second = await leased(state, worker="w2")
    assert await state.planned(spec.job, first.fence, make_plan(3)) == "in_progress"
    [renewed] = await state.renew("w2", [(spec.job, "plan", second.fence)], TTL_MS)
    assert (renewed.ok, renewed.state) == (False, "in_progress")


async def test_a_plan_without_shards_goes_straight_to_finalizing(state: State) -> None:
    job = await planned_job(state, failed=3)
    found = await status(state, job)
    assert (found.state, found.total, found.failed) == ("finalizing", 3, 3)
    assert (await leased(state)).kind == "finalize"


async def test_a_refused_file_is_planned_as_nothing_and_says_why(state: State) -> None:
    spec = make_spec()
    await state.create(spec, "out")
    held = await leased(state)
    plan = make_plan(refused={"code": "empty_file", "message": "The file holds no line."})
    assert await state.planned(spec.job, held.fence, plan) == "finalizing"
    found = await status(state, spec.job)
    assert (found.error_code, found.error_message) == ("empty_file", "The file holds no line.")


async def test_a_job_stopped_before_its_plan_is_planned_as_nothing(state: State) -> None:
    spec = make_spec()
    await state.create(spec, "out")
    assert (await state.stop(spec.job, "cancelled")).state == "cancelling"
    held = await leased(state)
    assert (held.kind, held.stop) == ("plan", "cancelled")
    assert await state.planned(spec.job, held.fence, make_plan(stopped="cancelled")) == "finalizing"


async def test_a_plan_that_knows_of_a_stop_tells_the_state(state: State) -> None:
    spec = make_spec()
    await state.create(spec, "out")
    held = await leased(state)
    assert await state.planned(spec.job, held.fence, make_plan(stopped="expired")) == "finalizing"
    assert (await leased(state)).stop == "expired"
    states = [event.data["state"] for event in await state.events(spec.job) if event.kind == "state"]
    assert states == ["validating", "expiring", "finalizing"]


async def test_a_stop_after_the_plan_was_made_leaves_its_shards_to_drain(state: State) -> None:
    spec = make_spec()
    await state.create(spec, "out")
    held = await leased(state)
    await state.stop(spec.job, "cancelled")
    assert await state.planned(spec.job, held.fence, make_plan(3)) == "cancelling"
    assert (await leased(state, fingerprint=None)).task == "shard:0"


async def test_planning_an_unknown_job_says_so(state: State) -> None:
    with pytest.raises(JobNotFound, match="Redis knows no job"):
        await state.planned("job-nobody-knows", "f", make_plan(1))


async def test_ten_thousand_shards_are_planned_in_one_call(state: State) -> None:
    job = await planned_job(state, *[5] * 10_000)
    assert (await status(state, job)).total == 50_000
    assert (await leased(state)).task == "shard:0"
    assert (await leased(state)).task == "shard:1"


# stop


@pytest.mark.parametrize(
    ("reason", "draining"), [("cancelled", "cancelling"), ("expired", "expiring"), ("failed", "failing")]
)
async def test_a_stop_drains_and_may_be_told_twice(state: State, reason: StopReason, draining: str) -> None:
    job = await planned_job(state, 5)
    for _ in range(2):
        outcome = await state.stop(job, reason, "code", "why")
        assert (outcome.accepted, outcome.state) == (True, draining)
    found = await status(state, job)
    assert (found.state, found.error_code, found.error_message) == (draining, "code", "why")
    held = await leased(state)
    assert held.stop == reason
    await state.committed(job, 0, make_record(0, 0, 5))
    assert (await status(state, job)).state == "finalizing"


async def test_the_first_reason_to_stop_stands(state: State) -> None:
    job = await planned_job(state, 5)
    await state.stop(job, "expired")
    outcome = await state.stop(job, "cancelled")
    assert (outcome.accepted, outcome.state) == (False, "expiring")


async def test_a_stop_is_refused_from_finalizing_on(state: State) -> None:
    job = await finalizing_job(state)
    outcome = await state.stop(job, "cancelled")
    assert (outcome.accepted, outcome.state) == (False, "finalizing")
    await state.finalized(job, make_manifest(2))
    outcome = await state.stop(job, "cancelled")
    assert (outcome.accepted, outcome.state) == (False, "completed")


async def test_a_stop_whose_reply_was_lost_is_still_accepted_when_the_job_has_drained(state: State) -> None:
    job = await planned_job(state, 5)
    await state.stop(job, "cancelled")
    await state.committed(job, 0, make_record(0, 0, 5))
    outcome = await state.stop(job, "cancelled")
    assert (outcome.accepted, outcome.state) == (True, "finalizing")
    await state.finalized(job, make_manifest(0, 5, "cancelled"))
    outcome = await state.stop(job, "cancelled")
    assert (outcome.accepted, outcome.state) == (True, "cancelled")
    assert not (await state.stop(job, "expired")).accepted


async def test_stopping_an_unknown_job_says_so(state: State) -> None:
    with pytest.raises(JobNotFound):
        await state.stop("job-nobody-knows", "cancelled")


# finalized


async def test_the_manifest_ends_the_job_and_its_sums_replace_the_counters(state: State) -> None:
    job = await planned_job(state, 10, failed=2)
    held = await leased(state)
    await state.seal(job, 0, held.fence, 1, {"key": "a"}, totals(5, 5))
    await state.committed(job, 0, make_record(0, 10))
    for _ in range(2):
        assert await state.finalized(job, make_manifest(10, 2, finished_at=123.5)) == "completed"
    found = await status(state, job)
    assert (found.state, found.total, found.completed, found.failed) == ("completed", 12, 10, 2)
    assert (found.prompt_tokens, found.finished_at, found.terminal) == (100, 123.5, True)


async def test_an_end_is_final(state: State) -> None:
    job = await finalizing_job(state)
    await state.finalized(job, make_manifest(2))
    assert await state.finalized(job, make_manifest(0, 2, state="failed")) == "completed"
    assert (await status(state, job)).completed == 2


@pytest.mark.parametrize("end", ["failed", "expired", "cancelled"])
async def test_a_job_ends_as_its_manifest_says(state: State, end: str) -> None:
    job = await finalizing_job(state)
    manifest = make_manifest(1, 1, state=end, error_code="storage_error", error_message="No room.")
    assert await state.finalized(job, manifest) == end
    found = await status(state, job)
    assert (found.state, found.error_code, found.error_message) == (end, "storage_error", "No room.")


async def test_a_manifest_ends_a_job_that_redis_remembers_as_running(state: State) -> None:
    job = await planned_job(state, 5, 5)
    held = await leased(state)
    await state.seal(job, 0, held.fence, 1, {"key": "a"}, totals(5))
    assert await state.finalized(job, make_manifest(10)) == "completed"
    assert await state.runnable(MODEL) == 0
    assert await lease(state) is None
    [renewed] = await state.renew("w1", [(job, held.task, held.fence)], TTL_MS)
    assert (renewed.ok, renewed.state) == (False, "completed")


async def test_a_manifest_without_an_end_is_refused(state: State) -> None:
    job = await finalizing_job(state)
    with pytest.raises(JobConflict):
        await state.finalized(job, make_manifest(2, state="in_progress"))
    with pytest.raises(JobNotFound):
        await state.finalized("job-nobody-knows", make_manifest(2))


async def test_after_the_end_only_what_people_read_is_kept_and_not_for_ever(state: State) -> None:
    job = await planned_job(state, 5, 5, retention_s=1000)
    await leased(state)
    await state.report(job, "w1", rows_running=3, tokens_per_second=5.0)
    await state.committed(job, 0, make_record(0, 5))
    await state.committed(job, 1, make_record(1, 5))
    await leased(state)
    await state.finalized(job, make_manifest(10))
    root = state.key(job)
    left = {key.decode().removeprefix(root) for key in await state.redis.keys(root.replace("{", "[{]") + "*")}
    assert left == {"", ":meta", ":parts", ":events"}
    for name in left:
        assert 0 < await state.redis.ttl(root + name) <= 1000
    assert await state.models() == []
    assert await state.unfinished(MODEL) == []


# states in general


async def test_a_job_never_moves_to_where_the_table_does_not_lead(state: State) -> None:
    """Every verb on every state; what is refused must leave the state as it was."""
    order = ["validating", "in_progress", "cancelling", "finalizing", "completed"]
    job = make_spec().job
    seen = []
    spec = make_spec(job=job)
    await state.create(spec, "out")
    held = await leased(state)
    for step in ("plan", "stop", "commit", "finalize"):
        seen.append((await status(state, job)).state)
        if step == "plan":
            await state.planned(job, held.fence, make_plan(2))
        elif step == "stop":
            await state.stop(job, "cancelled")
        elif step == "commit":
            await state.committed(job, 0, make_record(0, 0, 2))
        else:
            await state.finalized(job, make_manifest(0, 2, state="cancelled"))
        await state.planned(job, held.fence, make_plan(2))
        await state.create(spec, "out")
    seen.append((await status(state, job)).state)
    assert seen == [*order[:-1], "cancelled"]
