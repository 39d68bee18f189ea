"""The protocol as a whole: any order of calls, from workers alive, late or confused, each perhaps sent again.

Beside the real Redis runs a plain model of the store (what was decided) and of who did what. After every step
the two must agree, and at the end of every run one fresh worker must be able to bring all jobs to an end.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from job_steps import MODEL, TTL_MS, counts, lapse, make_manifest, make_plan, make_record, make_spec

from pagemill.jobs.errors import JobConflict
from pagemill.jobs.script import decoded, pairs
from pagemill.jobs.spec import JobSpec
from pagemill.jobs.state import LeaseLost, State, new_nonce
from pagemill.jobs.status import DRAINING, TERMINAL, JobStatus, Lease, StopReason, Totals

RANK = {
    "validating": 0,
    "in_progress": 1,
    **dict.fromkeys(DRAINING, 2),
    "finalizing": 3,
    **dict.fromkeys(TERMINAL, 4),
}
ENDS = {None: "completed", "cancelled": "cancelled", "expired": "expired", "failed": "failed"}
FIGURES = ("completed", "failed", "prompt_tokens", "completion_tokens", "cached_tokens", "shards_done")


@dataclass
class Shard:
    rows: int
    sealed: set[int] = field(default_factory=set)
    """Rows that some recorded segment holds. Row n fails when n is divisible by 3, whoever runs it."""
    record: dict[str, Any] | None = None

    def totals(self, rows: set[int]) -> tuple[int, int]:
        failed = sum(row % 3 == 0 for row in rows)
        return len(rows) - failed, failed


@dataclass
class Job:
    """What the store knows of a job, and what was seen of it."""

    spec: JobSpec
    cut: list[int]
    refused: int
    plan: dict[str, Any] | None = None
    told_plan: bool = False
    stop: StopReason | None = None
    shards: dict[int, Shard] = field(default_factory=dict)
    manifest: dict[str, Any] | None = None
    seen: JobStatus | None = None

    def expected(self) -> tuple[int, int]:
        """Completed and failed, as told to Redis."""
        both = [shard.totals(shard.sealed) for shard in self.shards.values()]
        refused = self.refused if self.told_plan and self.plan and "stopped" not in self.plan else 0
        return sum(c for c, _ in both), sum(f for _, f in both) + refused


@dataclass
class Held:
    """A lease, and what its holder has done under it. It may be long lost; its holder does not know."""

    lease: Lease
    nonce: str
    worker: str
    known: set[int]
    seq: int = 0


class Protocol(RuleBasedStateMachine):
    leases = Bundle("leases")

    def __init__(self, redis_url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.state = self.wait(State.connect(redis_url, prefix=f"test-{uuid.uuid4().hex[:12]}"))
        self.jobs: dict[str, Job] = {}
        self.fences: dict[tuple[str, str], str] = {}
        self.released: set[tuple[str, str, str]] = set()
        self.calls: list[Callable[[], Awaitable[object]]] = []

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def send(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Sends a call, every other one twice, and remembers it: it may arrive again at any later time."""
        self.calls.append(call)
        if len(self.calls) % 2:
            return self.wait(call())
        first, second = self.wait(call()), self.wait(call())
        return first if first is not None else second

    # what clients do

    @initialize()
    def start(self) -> None:
        """One job is planned from the start: most of what can go wrong lies behind the plan."""
        self.create([2, 3], 1, 0)
        self.tell_plan(self.picked(0))

    @precondition(lambda self: len(self.jobs) < 3)
    @rule(cut=st.lists(st.integers(1, 4), max_size=3), refused=st.integers(0, 2), priority=st.integers(-1, 1))
    def create(self, cut: list[int], refused: int, priority: int) -> None:
        spec = make_spec(priority=priority, max_shards=2)
        self.jobs[spec.job] = Job(spec, cut, refused)
        assert not self.send(lambda: self.state.create(spec, "out")).existed

    @precondition(lambda self: self.jobs)
    @rule(pick=st.integers(0, 2), reason=st.sampled_from(["cancelled", "expired", "failed"]))
    def stop(self, pick: int, reason: StopReason) -> None:
        job = self.picked(pick)
        before = self.status(job)
        outcome = self.send(lambda: self.state.stop(job.spec.job, reason))
        open_before = before.state in ("validating", "in_progress")
        # Whoever asks again is told the same, however far the job has come since.
        assert outcome.accepted == (open_before or reason in (job.stop, before.state))
        if open_before:
            job.stop = reason

    # what workers do

    @rule(target=leases, worker=st.sampled_from(["w1", "w2", "w3"]), starved=st.booleans())
    def lease(self, worker: str, starved: bool) -> Any:
        nonce = new_nonce()
        got = self.send(lambda: self.ask(worker, nonce, starved))
        if got is None:
            return multiple()
        self.check_new_fence(got)
        return Held(got, nonce, worker, self.rows_known(got))

    @rule(held=leases)
    def lease_again(self, held: Held) -> None:
        """The reply of a lease was lost, and the call is sent again."""
        again = self.wait(self.ask(held.worker, held.nonce, False))
        assert (again.fence if again else None) in (None, held.lease.fence)
        assert (again is not None) == self.is_current(held)

    @rule(held=leases)
    def renew(self, held: Held) -> None:
        lease = held.lease
        [renewed] = self.send(
            lambda: self.state.renew(held.worker, [(lease.job, lease.task, lease.fence)], TTL_MS)
        )
        assert renewed.ok == self.is_current(held)

    @rule(held=leases)
    def run_out(self, held: Held) -> None:
        """The worker freezes past its deadline; it does not know, and may go on later."""
        if self.is_current(held):
            self.wait(lapse(self.state, held.lease.job, held.lease.task))

    @rule(held=consumes(leases))
    def release(self, held: Held) -> None:
        lease, current = held.lease, self.is_current(held)
        assert self.send(lambda: self.state.release(lease.job, lease.task, lease.fence)) == current
        self.released.add((lease.job, lease.task, lease.fence))

    @rule(held=leases, take=st.sampled_from([0, 1, 2]))
    def work(self, held: Held, take: int) -> None:
        """Whoever believes to hold a task may end it: one decision wins in the store, all tell of it."""
        job = self.jobs[held.lease.job]
        if held.lease.kind == "plan":
            self.tell_plan(job)
        elif held.lease.kind == "finalize":
            self.tell_manifest(job)
        elif take:
            self.seal(job, held, take)
        else:
            self.tell_commit(job, cast(int, held.lease.shard), held.lease.fence)

    @rule(target=leases, held=leases, worker=st.sampled_from(["w1", "w2"]))
    def take_over(self, held: Held, worker: str) -> Any:
        """The holder freezes, somebody else leases, and the holder wakes up without knowing."""
        self.run_out(held)
        return self.lease(worker, False)

    def seal(self, job: Job, held: Held, take: int) -> None:
        lease, number = held.lease, cast(int, held.lease.shard)
        shard = job.shards[number]
        rows = set(sorted(set(range(shard.rows)) - held.known)[:take])
        held.seq, seq = held.seq + 1, held.seq + 1
        held.known |= rows
        totals = Totals(**counts(*shard.totals(held.known)))
        segment = {"rows": sorted(rows)}
        current = self.is_current(held)
        try:
            sealed = self.send(lambda: self.state.seal(lease.job, number, lease.fence, seq, segment, totals))
        except LeaseLost:
            assert not current
        else:
            assert current
            assert sealed.counted
            shard.sealed |= rows

    # what the network does

    @precondition(lambda self: self.calls)
    @rule(pick=st.integers(0, 10_000))
    def send_again(self, pick: int) -> None:
        """A call of any age arrives once more. It may be refused; it may not change what is counted."""
        before = self.figures()
        call = self.calls[pick % len(self.calls)]
        try:
            reply = self.wait(call())  # type: ignore[arg-type]
        except (LeaseLost, JobConflict):
            reply = None
        assert self.figures() == before
        if isinstance(reply, Lease) and self.fences.get((reply.job, reply.task)) != reply.fence:
            # A call to lease whose first answer was "nothing" finds something now: a lease like any other.
            self.check_new_fence(reply)

    # what must always be true

    @invariant()
    def all_promises_hold(self) -> None:
        for job, (now, pending, leased) in zip(self.jobs.values(), self.wait(self.look()), strict=True):
            self.only_forward(job, now)
            self.nothing_is_counted_twice_or_lost(job, now)
            self.a_task_waits_or_is_leased_or_is_done(job, now, pending, leased)

    def only_forward(self, job: Job, now: JobStatus) -> None:
        if job.seen:
            was = job.seen
            assert RANK[now.state] > RANK[was.state] or now.state == was.state
            assert all(getattr(now, name) >= getattr(was, name) for name in FIGURES)
        job.seen = now

    def nothing_is_counted_twice_or_lost(self, job: Job, now: JobStatus) -> None:
        assert (now.completed, now.failed) == job.expected()
        assert now.completed + now.failed <= now.total or not job.told_plan
        assert now.shards_done == sum(shard.record is not None for shard in job.shards.values())
        if now.terminal:
            assert now.completed + now.failed == now.total
            assert job.manifest is not None
            assert now.state == job.manifest["state"]

    def a_task_waits_or_is_leased_or_is_done(
        self, job: Job, now: JobStatus, pending: set[str], leased: set[str]
    ) -> None:
        assert not pending & leased
        due: set[str] = set()
        if not job.told_plan and not now.terminal:
            due = {"plan"}
        elif now.state == "finalizing":
            due = {"finalize"}
        elif not now.terminal:
            due = {f"shard:{number}" for number, shard in job.shards.items() if shard.record is None}
        assert pending | leased == due

    def teardown(self) -> None:
        """No job is stuck: whatever happened, a fresh worker ends them all."""
        try:
            self.finish_everything()
        finally:
            self.wait(self.state.close())
            self.runner.close()

    def finish_everything(self) -> None:
        for name, (_, _, leased) in zip(self.jobs, self.wait(self.look()), strict=True):
            for task in leased:
                self.wait(lapse(self.state, name, task))
        for _ in range(100):
            got = self.wait(self.ask("last", new_nonce(), False))
            if got is None:
                break
            self.check_new_fence(got)
            job = self.jobs[got.job]
            if got.kind == "plan":
                self.tell_plan(job)
            elif got.kind == "shard":
                self.tell_commit(job, cast(int, got.shard), got.fence)
            else:
                self.tell_manifest(job)
            self.all_promises_hold()
        assert all(now.terminal for now, _, _ in self.wait(self.look()))
        assert self.wait(self.state.runnable(MODEL)) == 0
        assert self.wait(self.state.unfinished(MODEL)) == []

    # steps

    async def ask(self, worker: str, nonce: str, starved: bool) -> Lease | None:
        return await self.state.lease(
            MODEL, worker=worker, nonce=nonce, ttl_ms=TTL_MS, fingerprint="weights", starved_only=starved
        )

    def tell_plan(self, job: Job) -> None:
        if job.plan is None:
            job.plan = make_plan(stopped=job.stop) if job.stop else make_plan(*job.cut, failed=job.refused)
        plan = job.plan
        self.send(lambda: self.state.planned(job.spec.job, "any", plan))
        if not job.told_plan:
            job.shards = {entry["shard"]: Shard(entry["rows"]) for entry in plan["shards"]}
            job.told_plan = True

    def tell_commit(self, job: Job, number: int, fence: str) -> None:
        shard = job.shards[number]
        if shard.record is None:
            shard.record = make_record(number, *shard.totals(set(range(shard.rows))), fence=fence)
        shard.sealed = set(range(shard.rows))
        record = shard.record
        outcome = self.send(lambda: self.state.committed(job.spec.job, number, record))
        assert outcome.record == record

    def tell_manifest(self, job: Job) -> None:
        if job.manifest is None:
            job.manifest = make_manifest(*job.expected(), state=ENDS[job.stop])
        manifest = job.manifest
        assert self.send(lambda: self.state.finalized(job.spec.job, manifest)) == manifest["state"]

    # looks

    def picked(self, pick: int) -> Job:
        return list(self.jobs.values())[pick % len(self.jobs)]

    def status(self, job: Job) -> JobStatus:
        found: JobStatus = self.wait(self.state.status(job.spec.job))
        return found

    async def look(self) -> list[tuple[JobStatus, set[str], set[str]]]:
        """Of every job its status, its tasks that wait and those that are leased."""
        names = list(self.jobs)
        keys = [self.state.key(name) for name in names]
        replies = await self.state.scripts.call_many(
            "status", [(key, (self.state.prefix, 10_000)) for key in keys]
        )
        async with self.state.redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.zrange(f"{key}:pending", 0, -1)
                pipe.zrange(f"{key}:leases", 0, -1)
            tasks = [set(names) for names in decoded(await pipe.execute())]
        found = [JobStatus.from_hash(name, pairs(flat)) for name, flat in zip(names, replies, strict=True)]
        return list(zip(found, tasks[::2], tasks[1::2], strict=True))

    def figures(self) -> list[object]:
        found = [job for job, _, _ in self.wait(self.look())]
        return [(job.state, job.total, *(getattr(job, name) for name in FIGURES)) for job in found]

    def rows_known(self, lease: Lease) -> set[int]:
        if lease.shard is None:
            return set()
        return {
            row for each in self.wait(self.state.segments(lease.job, lease.shard)) for row in each["rows"]
        }

    def check_new_fence(self, lease: Lease) -> None:
        key = (lease.job, lease.task)
        assert lease.fence > self.fences.get(key, "")
        self.fences[key] = lease.fence

    def is_current(self, held: Held) -> bool:
        """By the rules: the last to be granted the task, which has neither ended nor been handed back."""
        lease, job = held.lease, self.jobs[held.lease.job]
        if (
            self.fences[(lease.job, lease.task)] != lease.fence
            or (lease.job, lease.task, lease.fence) in self.released
        ):
            return False
        if lease.shard is not None:
            return job.shards[lease.shard].record is None and job.manifest is None
        return not job.told_plan if lease.kind == "plan" else job.manifest is None


def test_any_order_of_calls_keeps_the_promises(redis_url: str) -> None:
    chosen = settings(
        max_examples=30,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(lambda: Protocol(redis_url), settings=chosen)
