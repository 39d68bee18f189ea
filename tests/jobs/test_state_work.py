"""What workers tell of their work: seals and commits that count once, blocks, live figures, heartbeats."""

from __future__ import annotations

from typing import Any, cast

import pytest
from job_steps import (
    MODEL,
    TTL_MS,
    finalizing_job,
    lapse,
    leased,
    make_manifest,
    make_record,
    make_spec,
    planned_job,
    status,
    text,
    totals,
)

from pagemill.jobs.errors import JobConflict, JobNotFound, ProtocolMismatch
from pagemill.jobs.state import LeaseLost, State
from pagemill.jobs.status import WorkerInfo

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
