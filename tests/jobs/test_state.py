"""The verbs of the protocol: each runs twice and counts once, and each refuses what it must."""

from __future__ import annotations

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
    text,
)

from pagemill.jobs.errors import JobConflict, JobNotFound, ProtocolMismatch
from pagemill.jobs.state import LeaseLost, State
from pagemill.jobs.status import JobStatus, StopReason, Totals, WorkerInfo


async def status(state: State, job: str) -> JobStatus:
    found = await state.status(job)
    assert found is not None
    return found


def totals(completed: int, failed: int = 0) -> Totals:
    return Totals(**counts(completed, failed))


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


# seal


async def test_a_seal_sent_twice_counts_once(state: State) -> None:
    job = await planned_job(state, 10)
    held = await leased(state)
    first = await state.seal(job, 0, held.fence, 1, {"key": "a"}, totals(4, 1))
    again = await state.seal(job, 0, held.fence, 1, {"key": "a"}, totals(4, 1))
    assert (first.counted, again.counted) == (True, False)
    found = await status(state, job)
    assert (found.completed, found.failed, found.prompt_tokens, found.cached_tokens) == (4, 1, 40, 12)
    assert await state.segments(job, 0) == [{"key": "a"}]


async def test_seals_pass_absolute_totals_and_the_counters_get_the_difference(state: State) -> None:
    job = await planned_job(state, 10, 10)
    held = await leased(state)
    await state.seal(job, 0, held.fence, 1, {"key": "a"}, totals(4, 1))
    await state.seal(job, 0, held.fence, 2, {"key": "b"}, totals(6, 2))
    found = await status(state, job)
    assert (found.completed, found.failed, found.completion_tokens) == (6, 2, 120)


async def test_a_takeover_goes_on_from_what_was_sealed(state: State) -> None:
    job = await planned_job(state, 10)
    first = await leased(state)
    await state.seal(job, 0, first.fence, 1, {"key": "a"}, totals(4))
    await lapse(state, first.job, first.task)
    second = await leased(state, worker="w2")
    assert await state.segments(job, 0) == [{"key": "a"}]
    await state.seal(job, 0, second.fence, 1, {"key": "b"}, totals(7))
    assert (await status(state, job)).completed == 7
    assert [segment["key"] for segment in await state.segments(job, 0)] == ["a", "b"]


async def test_segments_come_in_the_order_of_fences_and_numbers(state: State) -> None:
    job = await planned_job(state, 100)
    first = await leased(state)
    for seq in range(1, 12):
        await state.seal(job, 0, first.fence, seq, {"n": seq}, totals(seq))
    await lapse(state, first.job, first.task)
    second = await leased(state)
    await state.seal(job, 0, second.fence, 1, {"n": 12}, totals(12))
    assert [segment["n"] for segment in await state.segments(job, 0)] == list(range(1, 13))


async def test_a_seal_after_the_shard_was_taken_over_is_refused(state: State) -> None:
    job = await planned_job(state, 10)
    first = await leased(state)
    await lapse(state, first.job, first.task)
    await leased(state, worker="w2")
    with pytest.raises(LeaseLost):
        await state.seal(job, 0, first.fence, 1, {"key": "a"}, totals(4))
    assert (await status(state, job)).completed == 0


async def test_a_seal_that_had_arrived_is_confirmed_even_after_a_takeover(state: State) -> None:
    job = await planned_job(state, 10)
    first = await leased(state)
    await state.seal(job, 0, first.fence, 1, {"key": "a"}, totals(4))
    await lapse(state, first.job, first.task)
    await leased(state, worker="w2")
    assert not (await state.seal(job, 0, first.fence, 1, {"key": "a"}, totals(4))).counted


async def test_another_segment_under_the_same_fence_and_number_is_a_conflict(state: State) -> None:
    job = await planned_job(state, 10)
    held = await leased(state)
    await state.seal(job, 0, held.fence, 1, {"key": "a"}, totals(4))
    with pytest.raises(JobConflict, match="another segment"):
        await state.seal(job, 0, held.fence, 1, {"key": "b"}, totals(5))


async def test_a_seal_after_the_commit_is_refused(state: State) -> None:
    job = await planned_job(state, 10, 10)
    held = await leased(state)
    await state.committed(job, 0, make_record(0, 10))
    with pytest.raises(LeaseLost):
        await state.seal(job, 0, held.fence, 1, {"key": "a"}, totals(4))


async def test_seals_stay_open_while_a_job_drains(state: State) -> None:
    job = await planned_job(state, 10)
    held = await leased(state)
    await state.stop(job, "expired")
    sealed = await state.seal(job, 0, held.fence, 1, {"key": "a"}, totals(4))
    assert (sealed.counted, sealed.state, sealed.stop) == (True, "expiring", "expired")


async def test_sealing_an_unknown_job_says_so(state: State) -> None:
    with pytest.raises(JobNotFound):
        await state.seal("job-nobody-knows", 0, "f", 1, {}, totals(1))


async def test_counters_neither_fall_nor_pass_the_total_whatever_is_reported(state: State) -> None:
    job = await planned_job(state, 10)
    held = await leased(state)
    await state.seal(job, 0, held.fence, 1, {"n": 1}, totals(5, 5))
    await state.seal(job, 0, held.fence, 2, {"n": 2}, totals(8, 2))
    await state.seal(job, 0, held.fence, 3, {"n": 3}, totals(30, 30))
    found = await status(state, job)
    assert (found.completed, found.failed) == (5, 5)


# committed


async def test_a_commit_told_twice_counts_once_and_the_first_record_stays(state: State) -> None:
    job = await planned_job(state, 10, 10)
    ours, theirs = make_record(0, 9, 1, fence="a"), make_record(0, 10, 0, fence="b")
    assert (await state.committed(job, 0, ours)).record == ours
    outcome = await state.committed(job, 0, theirs)
    assert (outcome.record, outcome.part, outcome.state) == (ours, ours["part"], "in_progress")
    found = await status(state, job)
    assert (found.completed, found.failed, found.shards_done) == (9, 1, 1)


async def test_a_commit_brings_sealed_counts_up_to_the_parts(state: State) -> None:
    job = await planned_job(state, 10, 10)
    held = await leased(state)
    await state.seal(job, 0, held.fence, 1, {"key": "a"}, totals(4, 1))
    await state.committed(job, 0, make_record(0, 8, 2))
    found = await status(state, job)
    assert (found.completed, found.failed, found.prompt_tokens) == (8, 2, 80)
    assert await state.segments(job, 0) == []


async def test_a_commit_ends_whatever_lease_the_shard_has(state: State) -> None:
    job = await planned_job(state, 10, 10)
    held = await leased(state, worker="w2")
    await state.committed(job, 0, make_record(0, 10))
    [renewed] = await state.renew("w2", [(job, held.task, held.fence)], TTL_MS)
    assert not renewed.ok
    assert not await state.release(job, held.task, held.fence)
    assert (await leased(state)).task == "shard:1"


async def test_the_last_commit_starts_finalizing_and_its_copy_still_answers_afterwards(state: State) -> None:
    job = await planned_job(state, 5, 5)
    assert (await state.committed(job, 1, make_record(1, 5))).state == "in_progress"
    assert (await state.committed(job, 0, make_record(0, 5))).state == "finalizing"
    held = await leased(state)
    assert held.kind == "finalize"
    assert (await state.committed(job, 0, make_record(0, 5))).state == "finalizing"
    await state.finalized(job, make_manifest(10))
    assert (await state.committed(job, 0, make_record(0, 5))).state == "completed"


async def test_a_commit_of_a_shard_that_the_plan_does_not_have_is_refused(state: State) -> None:
    job = await planned_job(state, 5)
    with pytest.raises(JobConflict, match="refused"):
        await state.committed(job, 7, make_record(7, 5))
    with pytest.raises(JobNotFound):
        await state.committed("job-nobody-knows", 0, make_record(0, 5))


async def test_a_commit_before_the_plan_is_refused(state: State) -> None:
    spec = make_spec()
    await state.create(spec, "out")
    with pytest.raises(JobConflict, match="validating"):
        await state.committed(spec.job, 0, make_record(0, 5))


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


# block, report, heartbeat


async def test_a_block_is_a_sentence_until_work_succeeds(state: State) -> None:
    job = await planned_job(state, 10)
    held = await leased(state)
    for _ in range(2):
        await state.block(job, "The store refuses: no space left; free some.")
    found = await status(state, job)
    assert (found.state, found.blocked_reason) == (
        "in_progress",
        "The store refuses: no space left; free some.",
    )
    assert [event.kind for event in await state.events(job)].count("blocked") == 2  # one of them: no worker
    await state.seal(job, 0, held.fence, 1, {"key": "a"}, totals(4))
    assert (await status(state, job)).blocked_reason == ""


async def test_a_block_can_be_taken_back_and_is_refused_at_the_end(state: State) -> None:
    job = await finalizing_job(state)
    await state.block(job, "why")
    await state.unblock(job)
    await state.unblock(job)
    assert await text(state, state.key(job), "blocked_reason") == ""
    await state.finalized(job, make_manifest(2))
    with pytest.raises(JobConflict):
        await state.block(job, "why")
    with pytest.raises(JobNotFound):
        await state.block("job-nobody-knows", "why")


async def test_live_figures_are_summed_over_the_workers_that_report(state: State) -> None:
    job = await planned_job(state, 100)
    held = await leased(state)
    await state.seal(job, 0, held.fence, 1, {"key": "a"}, totals(20))
    for _ in range(2):
        await state.report(job, "w1", rows_running=3, tokens_per_second=50.0)
        await state.report(job, "w2", rows_running=4, tokens_per_second=30.0)
    found = await status(state, job)
    assert (found.rows_running, found.workers_active, found.tokens_per_second) == (7, 2, 80.0)
    assert found.eta_seconds == 20.0  # 80 rows of 20 tokens each, at 80 tokens/s
    await state.report(job, "w2", rows_running=0, tokens_per_second=0.0)
    found = await status(state, job)
    assert (found.rows_running, found.workers_active) == (3, 1)


async def test_the_figures_of_a_worker_that_fell_silent_do_not_count(state: State) -> None:
    job = await planned_job(state, 100)
    stale: Any = {"w9": '{"rows": 50, "tokens_per_second": 99, "at": 1}'}
    await cast(Any, state.redis.hset(f"{state.key(job)}:running", mapping=stale))
    await cast(Any, state.redis.hset(state.key(job), mapping={"rows_running": 50, "workers_active": 1}))
    found = await status(state, job)
    assert (found.rows_running, found.workers_active) == (0, 0)
    await state.report(job, "w1", rows_running=3, tokens_per_second=5.0)
    found = await status(state, job)
    assert (found.rows_running, found.workers_active, found.tokens_per_second) == (3, 1, 5.0)


async def test_live_figures_are_zero_once_no_rows_run(state: State) -> None:
    job = await planned_job(state, 10)
    await state.report(job, "w1", rows_running=3, tokens_per_second=5.0)
    await state.committed(job, 0, make_record(0, 10))
    await state.report(job, "w1", rows_running=3, tokens_per_second=5.0)
    found = await status(state, job)
    assert (found.rows_running, found.workers_active, found.tokens_per_second, found.eta_seconds) == (
        0,
        0,
        0.0,
        None,
    )
    with pytest.raises(JobNotFound):
        await state.report("job-nobody-knows", "w1", rows_running=1, tokens_per_second=1.0)


async def test_workers_are_listed_while_their_heartbeat_lasts(state: State) -> None:
    info = WorkerInfo(
        "w1", host="here", pid=3, state="ready", models=(MODEL, "other"), context=2048, kv_used=0.5
    )
    for _ in range(2):
        await state.heartbeat(info, 60_000)
    [found] = await state.workers()
    assert (found.worker, found.models, found.context, found.kv_used) == ("w1", (MODEL, "other"), 2048, 0.5)
    assert found.seen_at > 0
    for _ in range(2):
        await state.goodbye("w1")
    assert await state.workers() == []


async def test_a_job_without_a_worker_says_so_until_one_comes(state: State) -> None:
    spec = make_spec()
    await state.create(spec, "out")
    assert (await status(state, spec.job)).blocked_reason == f"no worker serves {MODEL}"
    await state.heartbeat(WorkerInfo("w1", models=(MODEL,)), 60_000)
    assert (await status(state, spec.job)).blocked_reason == ""
    await leased(state)
    assert await text(state, state.key(spec.job), "blocked_reason") == ""
    later = make_spec()
    await state.create(later, "out")
    assert (await status(state, later.job)).blocked_reason == ""
    await state.goodbye("w1")
    assert (await status(state, later.job)).blocked_reason == f"no worker serves {MODEL}"


async def test_another_version_of_the_protocol_is_refused(state: State) -> None:
    await state.check_protocol()
    await state.check_protocol()
    await state.redis.set(f"{state.prefix}:protocol", "99")
    with pytest.raises(ProtocolMismatch, match="99"):
        await state.check_protocol()
    with pytest.raises(ProtocolMismatch, match="99"):
        await state.heartbeat(WorkerInfo("w1"), 1000)
