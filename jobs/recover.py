"""Rebuilds the state of a job that Redis has lost, from its objects, with the scripts that wrote it first.

    job.json            → create, under the next epoch and on hold: nobody leases what is half rebuilt
    stop.json           → stop, unless all rows ran before it
    plan.json           → planned
    model.json          → runs_on
    commits/<n>.json    → committed
    _work/<n>/…         → seal, for shards without a commit record
    manifest.json       → finalized

The epoch is an object claimed put-if-absent, so fences of the rebuilt job exceed all that were given before,
also those of a worker that has not noticed yet. A job that Redis still knows is left alone. A rebuild that
dies leaves a hold that runs out; the job then goes on from its plan and commit records, and sealed rows that
were not recorded yet are computed again, to the same tokens. This room may not know workers or engines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from pagemill.jobs import layout, tickets
from pagemill.jobs.commit import list_segments
from pagemill.jobs.errors import JobConflict, JobNotFound, ObjectNotFound, RedisUnavailable, StorageError
from pagemill.jobs.parquet import read_batches
from pagemill.jobs.remembered import output_url
from pagemill.jobs.spec import JobSpec
from pagemill.jobs.state import LeaseLost, State, new_nonce
from pagemill.jobs.status import Totals
from pagemill.jobs.stopping import stop_that_counts
from pagemill.jobs.storage import Storage, decide, read_json

HOLD_MS: Final = 30_000
REBUILDS: Final = 5
"""How often a rebuild begins anew that Redis forgot in the middle of it."""
SECOND: Final = 1_000_000
"""Added to the number of a segment whose number another one has; no holder ever gets that far."""
AT_ONCE: Final = 16
"""Objects read at the same time: a commit record is a round trip to the store, and there may be thousands."""
_COUNTED: Final = ["row_index", "status", "prompt_tokens", "completion_tokens", "cached_tokens"]


@dataclass(frozen=True, slots=True)
class Restored:
    """`rebuilt` is false when Redis knew the job, or another rebuild was faster."""

    job: str
    rebuilt: bool
    state: str
    epoch: int | None = None


async def restore(state: State, storage: Storage, job: str, *, hold_ms: int = HOLD_MS) -> Restored:
    """Makes Redis know a job again, as far as its objects tell, and puts out tickets for what is left to do.

    Raises JobNotFound when the store holds no such job either, JobConflict when it was deleted, StorageError,
    RedisUnavailable.
    """
    for _ in range(REBUILDS):
        with contextlib.suppress(_LostAgain):
            return await _restore(state, storage, job, hold_ms)
    raise RedisUnavailable(f"Redis loses job {job} again while it is rebuilt: see why it forgets.")


class _LostAgain(Exception):
    """Redis has forgotten the job, or our hold of it, while we told it what the objects say."""


async def _restore(state: State, storage: Storage, job: str, hold_ms: int) -> Restored:
    known = await state.status(job)
    if known is not None:
        return Restored(job, False, known.state)
    spec = await _spec(storage, job)
    epoch, token = await _claim(storage, job)
    created = await state.create_held(
        spec, output_url(storage, job), epoch=epoch, token=token, hold_ms=hold_ms
    )
    if not created.existed:
        try:
            async with _held(state, job, token, hold_ms):
                await _tell(state, storage, job, token)
            await state.hold(job, token, 0)
        except (JobNotFound, LeaseLost) as error:
            # It was flushed, or restored from a copy that another rebuild had begun in.
            raise _LostAgain from error
        waiting = await state.runnable(spec.model, tickets.SLOTS)
        await tickets.send(state.redis, spec.model, waiting, prefix=state.prefix)
    now = await state.status(job)
    return Restored(job, not created.existed, now.state if now else "", None if created.existed else epoch)


async def restore_all(state: State, storage: Storage) -> list[Restored]:
    """Restores every unfinished job of the store; a look at the names of all its objects."""
    return [await restore(state, storage, job) for job in await asyncio.to_thread(unfinished, storage)]


def unfinished(storage: Storage) -> list[str]:
    """Jobs of the store that were accepted and have neither ended nor been deleted."""
    accepted, over = set[str](), set[str]()
    for info in storage.list(layout.JOBS):
        job, _, name = info.key.removeprefix(layout.JOBS).partition("/")
        if name == "job.json":
            accepted.add(job)
        elif name in ("manifest.json", "tombstone.json"):
            over.add(job)
    return sorted(accepted - over)


async def _spec(storage: Storage, job: str) -> JobSpec:
    if await asyncio.to_thread(storage.head, layout.tombstone(job)) is not None:
        raise JobConflict(f"Job {job} was deleted; its rows are gone.")
    try:
        return JobSpec.load(await asyncio.to_thread(storage.get, layout.job(job)))
    except ObjectNotFound:
        raise JobNotFound(f"There is no job {job}, neither in this Redis nor in {storage.url}.") from None


async def _claim(storage: Storage, job: str) -> tuple[int, str]:
    """The next epoch, ours alone, and the token that proves it. Epoch 1 is that of the first `create`."""
    token, epoch = new_nonce(), 2
    while True:
        claim = {"job": job, "epoch": epoch, "token": token}
        _, ours = await asyncio.to_thread(decide, storage, layout.epoch(job, epoch), claim)
        if ours:
            return epoch, token
        epoch += 1


@contextlib.asynccontextmanager
async def _held(state: State, job: str, token: str, hold_ms: int) -> AsyncIterator[None]:
    """Keeps the hold from running out while the block runs."""

    async def lengthen() -> None:
        while True:
            await asyncio.sleep(hold_ms / 3000)
            await state.hold(job, token, hold_ms)

    task = asyncio.create_task(lengthen(), name=f"hold {job}")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _tell(state: State, storage: Storage, job: str, token: str) -> None:
    plan = await asyncio.to_thread(read_json, storage, layout.plan(job))
    stop = await asyncio.to_thread(stop_that_counts, storage, job, plan)
    if stop is not None:
        await state.stop(job, stop["reason"], stop.get("error_code", ""), stop.get("error_message", ""))
    if plan is not None:
        await state.planned(job, str(plan.get("fence", "")), plan)
        weights = await asyncio.to_thread(read_json, storage, layout.model(job))
        if weights is not None:
            await state.runs_on(job, weights["fingerprint"])
        committed = await _tell_commits(state, storage, job)
        await _tell_segments(state, storage, job, token, committed)
    manifest = await asyncio.to_thread(read_json, storage, layout.manifest(job))
    if manifest is not None:
        await state.finalized(job, manifest)


async def _tell_commits(state: State, storage: Storage, job: str) -> set[int]:
    def names() -> list[int]:
        numbers = (layout.commit_shard(info.key) for info in storage.list(layout.commits(job)))
        return [number for number in numbers if number is not None]

    async def tell(shard: int) -> None:
        record = await asyncio.to_thread(read_json, storage, layout.commit(job, shard))
        if record is None:
            raise StorageError(f"The commit record of shard {shard} of {job} vanished.", transient=True)
        await state.committed(job, shard, record)

    shards = await asyncio.to_thread(names)
    await _each(tell, shards)
    return set(shards)


async def _tell_segments(state: State, storage: Storage, job: str, token: str, committed: set[int]) -> None:
    def names() -> set[int]:
        found = (layout.segment_identity(info.key) for info in storage.list(layout.work(job)))
        return {identity[0] for identity in found if identity is not None}

    async def tell(shard: int) -> None:
        counted = _Counted()
        for segment in _numbered(await asyncio.to_thread(list_segments, storage, job, shard)):
            totals = await asyncio.to_thread(counted.add, storage, segment)
            await state.reseal(job, shard, segment["fence"], segment["seq"], segment, totals, token=token)

    await _each(tell, await asyncio.to_thread(names) - committed)


def _numbered(segments: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each under a (fence, seq) of its own. Two objects share one where a holder put the first, heard
    nothing, and put another with what had finished since."""
    seen = Counter[tuple[str, int]]()
    for segment in sorted(segments, key=lambda each: str(each["key"])):
        name = segment["fence"], segment["seq"]
        yield {**segment, "seq": segment["seq"] + SECOND * seen[name]}
        seen[name] += 1


@dataclass
class _Counted:
    """Totals of a shard over segments that may overlap: a row that two holders sealed counts once."""

    rows: set[int] = field(default_factory=set)
    totals: Totals = field(default_factory=Totals)

    def add(self, storage: Storage, segment: dict[str, Any]) -> Totals:
        sums = dict(zip(("completed", "failed", *_COUNTED[2:]), self.totals.as_args(), strict=True))
        with storage.as_file(segment["key"]) as path:
            for batch in read_batches(path, columns=_COUNTED, name=segment["key"]):
                for row in batch.to_pylist():
                    if row["row_index"] not in self.rows:
                        self.rows.add(row["row_index"])
                        sums[row["status"]] += 1
                        for name in _COUNTED[2:]:
                            sums[name] += row[name] or 0
        self.totals = Totals.of(sums)
        return self.totals


async def _each(work: Callable[[int], Awaitable[None]], shards: Iterable[int]) -> None:
    """All of them, a few at once; the first failure ends the others, and is the one raised."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(shard: int) -> None:
        async with turn:
            await work(shard)

    try:
        async with asyncio.TaskGroup() as group:
            for shard in shards:
                group.create_task(one(shard))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
