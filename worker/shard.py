"""Run one shard: its rows through the engine, finished ones sealed as they come, all of them committed once.

    commit record there?  adopt it                 stopped   what is finished is kept, the rest are error rows
    sealed segments       those rows are done      lost      stop, and publish nothing more
    the rest              into the engine          leaving   seal what is finished; the next holder goes on
                                                   winding up   the same, once the rows under way have ended

A row's failure is a row's result, and never the shard's. This room may not know how tasks are leased, nor
what runs the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from pagemill.jobs import layout
from pagemill.jobs.commit import RowsDoNotMatch, commit_shard, read_commit, read_sealed, write_segment
from pagemill.jobs.errors import ModelError, StorageError
from pagemill.jobs.plan import shard_lines
from pagemill.jobs.result import ResultRow, to_json
from pagemill.jobs.row import Row
from pagemill.jobs.settle import stopped_row
from pagemill.jobs.spec import JobSpec
from pagemill.jobs.state import LeaseLost
from pagemill.jobs.status import StopReason, Totals
from pagemill.jobs.storage import Storage, read_json
from pagemill.worker.aside import Aside
from pagemill.worker.blame import DEATHS_ALONE
from pagemill.worker.engine_host import CANARY
from pagemill.worker.isolation import Isolation
from pagemill.worker.lease import Guard, Released
from pagemill.worker.logs import about
from pagemill.worker.wire import beside
from pagemill.worker.workshop import Workshop

log = logging.getLogger("pagemill.worker")

WIND_UP_S = 0.25
POISON = {
    "status": "failed",
    "error_code": "poison_row",
    "error_message": f"The whole worker died while running this row alone, {DEATHS_ALONE} times.",
}


async def run_shard(shop: Workshop, guard: Guard, *, urgent: bool = False, isolated: bool = False) -> None:
    """Take a leased shard to its commit record. Raises Released when it is not ours to finish.

    urgent: its rows go before others that wait in the engine, since nobody works on this job yet.
    isolated: its rows may kill the worker, and go in small groups that are written down first.
    """
    job, shard = guard.lease.job, guard.lease.shard
    assert shard is not None
    record = await shop.insist(guard, lambda: read_commit(shop.storage, job, shard))
    if record is None:
        await _heed_stop(shop, guard)
        spec, plan = await shop.spec(guard), await shop.plan(guard)
        await _same_weights(shop, guard)
        entry = next(entry for entry in plan["shards"] if entry["shard"] == shard)
        rows = await shop.insist(guard, lambda: read_texts(shop.storage, entry))
        record = await ShardRun(shop, guard, spec, entry, rows, urgent, isolated).run()
    await shop.state.committed(job, shard, record)


def read_texts(storage: Storage, entry: dict[str, Any]) -> list[tuple[Row, bytes]]:
    """The rows of a shard, each with the JSON text that it goes to the engine as. Blocks."""
    return [(Row.from_json(line), line) for line in shard_lines(storage, entry)]


async def _heed_stop(shop: Workshop, guard: Guard) -> None:
    """A stop that the store knows and Redis does not (its teller died in between) counts all the same."""
    job = guard.lease.job
    stop = await shop.insist(guard, lambda: read_json(shop.storage, layout.stop(job)))
    if stop is not None and guard.stop is None:
        reason: StopReason = stop["reason"]
        await shop.state.stop(job, reason, stop.get("error_code", ""), stop.get("error_message", ""))
        guard.stop = reason


async def _same_weights(shop: Workshop, guard: Guard) -> None:
    """A Redis that forgot them may have given us a job that began on other weights; the store decides."""
    decided, ours = await shop.weights(guard), guard.lease.fingerprint
    if decided != ours:
        await shop.state.runs_on(guard.lease.job, decided)
        raise ModelError(f"The job began with other weights ({decided}) than this worker serves ({ours}).")


class ShardRun:
    """One lease's work on one shard."""

    def __init__(
        self,
        shop: Workshop,
        guard: Guard,
        spec: JobSpec,
        entry: dict[str, Any],
        rows: list[tuple[Row, bytes]],
        urgent: bool,
        isolated: bool,
    ) -> None:
        self._shop, self._guard, self._spec, self._entry = shop, guard, spec, entry
        self._rows = {row.row_index: row for row, _ in rows}
        self._texts = {row.row_index: text for row, text in rows}
        self._left = dict(self._rows)  # neither sealed nor finished
        self._segments: list[dict[str, Any]] = []
        self._down: set[int] = set()  # in the engine
        self._finished: list[ResultRow] = []
        self._oldest = 0.0  # when the oldest of them finished
        self._seq = 0
        self._urgent, self._isolated = urgent, isolated
        self._news = asyncio.Event()

    async def run(self) -> dict[str, Any]:
        """The commit record that counts."""
        await self._take_over()
        while True:
            try:
                await (self._compute_in_groups() if self._isolated else self._compute())
                return await self._commit()
            except Released:
                if self._guard.leaving and not self._guard.lost:
                    await self._seal(last=True)
                elif self._guard.forgotten:
                    await self._keep()
                raise
            except RowsDoNotMatch as error:
                if error.unexpected or not error.missing or not self._segments:
                    raise
                log.warning("a sealed segment is gone or damaged: %s Those rows run again.", error)
                self._left = {index: row for index, row in self._rows.items() if index in error.missing}

    async def _compute(self) -> None:
        """Until no row is left, or the job was stopped."""
        feeding = asyncio.create_task(self._feed(), name=f"feed {self._guard.lease.task}")
        try:
            await self._gather(feeding)
        finally:
            feeding.cancel()
            self._shop.engine.abort([self._rid(row_index) for row_index in self._down])
            self._count_running(-len(self._down))
            self._down.clear()

    async def _compute_in_groups(self) -> None:
        """The same for a shard that kills workers; what is known of it outlives this one (isolation.py)."""
        state, lease = self._shop.state, self._guard.lease
        text, died_under = await state.trial(lease.job, lease.task)
        known = Isolation.load(text)
        if died_under not in ("", lease.fence) and (poison := known.mourn(self._left)) is not None:
            with about(row=poison):
                log.error("row %d of %s is poison: workers died with it alone", poison, lease.job)
            self._settle(self._left[poison], POISON)
            await self._seal()
        while self._left and self._guard.stop is None:
            group = known.next(self._left)
            if known.wants_canary:
                await self._canary()
            await self._note(known, trying=True)
            rest = self._left
            self._left = {row_index: rest.pop(row_index) for row_index in group}
            try:
                await self._compute()
                await self._seal()
            finally:
                self._left.update(rest)
        await self._note(known, trying=False)

    async def _note(self, known: Isolation, *, trying: bool) -> None:
        lease = self._guard.lease
        try:
            await self._shop.state.note_trial(lease.job, lease.task, lease.fence, known.dump(), trying=trying)
        except LeaseLost:
            self._guard.lose()
            raise Released from None

    async def _canary(self) -> None:
        """A row known to be good goes through, or this machine is no judge of others."""
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        rid = f"{self._rid(0)}/canary"
        await self._shop.engine.submit(rid, CANARY["row"], answer.set_result)
        gone = asyncio.create_task(self._guard.gone.wait())
        ends: set[asyncio.Future[Any]] = {answer, gone}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            self._shop.engine.abort([rid])
        self._guard.check()
        if answer.result()["status"] != "completed":
            raise ModelError("The engine fails on a row that is known to be good.")

    def _rid(self, row_index: int) -> str:
        """Carries the fence, so that a row of this lease is never taken for one of another."""
        lease = self._guard.lease
        return f"{lease.job}/{lease.shard}/{lease.fence}/{row_index}"

    # -- what earlier holders left --------------------------------------------------------------------

    async def _take_over(self) -> None:
        lease, storage = self._guard.lease, self._shop.storage
        assert lease.shard is not None
        recorded = await self._shop.state.segments(lease.job, lease.shard)
        if not recorded:
            return
        sealed = await self._shop.insist(self._guard, lambda: read_sealed(storage, recorded))
        for segment in sealed.lost:
            log.warning("segment %s is gone or damaged; its rows run again", segment["key"])
        self._segments = list(sealed.segments)
        for row_index in sealed.row_indexes:
            self._left.pop(row_index, None)
        log.info("%s of %s: %d rows are sealed already", lease.task, lease.job, len(sealed.row_indexes))

    # -- rows down, completions up --------------------------------------------------------------------

    async def _feed(self) -> None:
        shop, spec = self._shop, self._spec
        told = beside(
            context=spec.context,
            special=spec.special_tokens_in_content,
            # Twice the priority, so that one step of urgency fits between two priorities.
            priority=2 * spec.priority + self._urgent,
            group=spec.job,
        )
        for row in list(self._left.values()):
            text, take = self._texts[row.row_index], partial(self._take, row)
            await shop.engine.submit(self._rid(row.row_index), text, take, told)
            self._down.add(row.row_index)
            self._count_running(1)

    def _take(self, row: Row, message: Mapping[str, Any]) -> None:
        """A completion, or a row that was recalled, in the event loop."""
        self._down.discard(row.row_index)
        self._count_running(-1)
        if message["status"] != "aborted":
            self._settle(row, message)
        elif not self._down:
            self._news.set()

    def _settle(self, row: Row, message: Mapping[str, Any]) -> None:
        """Whatever the message holds, the row has a result."""
        try:
            result = result_row(row, message, self._spec.model, self._guard.lease.attempt)
        except (ValueError, KeyError, TypeError) as error:
            # The engine's messages come in outside of any task.
            with about(job=self._spec.job, shard=self._guard.lease.shard, row=row.row_index):
                log.exception("row %d: the engine's answer cannot be read", row.row_index)
            result = ResultRow.error_row(row, "engine_error", f"The engine's answer cannot be read: {error}.")
        self._left.pop(row.row_index, None)
        if not self._finished:
            self._oldest = asyncio.get_running_loop().time()
        self._finished.append(result)
        shop = self._shop
        shop.figures.times(message)
        shop.figures.row(result.status, result.prompt_tokens, result.completion_tokens, result.cached_tokens)
        if len(self._finished) in (1, shop.settings.seal_rows) or not self._left:
            self._news.set()

    def _count_running(self, change: int) -> None:
        self._shop.rows_running[self._spec.job] += change

    async def _gather(self, feeding: asyncio.Task[None]) -> None:
        """Seal what finishes until nothing is left or the work has to stop."""
        guard, settings = self._guard, self._shop.settings
        while self._left and guard.stop is None:
            guard.check()
            if guard.winding_up:
                self._wind_up(feeding)
            if feeding.done() and not feeding.cancelled() and feeding.exception() is not None:
                feeding.result()
            due = None
            if self._finished:
                due = self._oldest + settings.seal_seconds - asyncio.get_running_loop().time()
                if due <= 0 or len(self._finished) >= settings.seal_rows:
                    await self._seal()
                    continue
            await self._something(feeding, WIND_UP_S if guard.winding_up else due)

    def _wind_up(self, feeding: asyncio.Task[None]) -> None:
        """Begin no row more. Raises Released when none is under way either.

        Rows in a step are finished, since one that takes longer than a slice of its model would otherwise
        never be; after a death of the engine none is under way, and all are handed back.
        """
        feeding.cancel()
        begun = self._shop.engine.under_way()
        # Of those that are in no step some have just been finished, and their completions are on the way.
        self._shop.engine.recall(rid for rid in map(self._rid, list(self._down)) if rid not in begun)
        if not self._down:
            self._guard.leave()
            self._guard.check()

    async def _something(self, feeding: asyncio.Task[None], seconds: float | None) -> None:
        """Wait for completions, a change of the lease, trouble in feeding, or `seconds` at most."""
        news = asyncio.create_task(self._news.wait())
        changed = asyncio.create_task(self._guard.changed.wait())
        waits: set[asyncio.Task[Any]] = {news, changed}
        if not feeding.done():
            waits.add(feeding)
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
            changed.cancel()
        self._news.clear()
        self._guard.changed.clear()

    async def _seal(self, *, last: bool = False) -> None:
        """Make what is finished outlive this worker: an object first, then its record under our fence."""
        rows, self._finished = self._finished, []
        if not rows:
            return
        shop, guard, lease = self._shop, self._guard, self._guard.lease
        assert lease.shard is not None
        call = partial(write_segment, shop.storage, lease.job, lease.shard, lease.fence, self._seq, rows)
        try:
            segment = await (asyncio.to_thread(call) if last else shop.insist(guard, call))
        except BaseException:
            self._finished = rows + self._finished
            raise
        self._segments.append(segment)
        try:
            outcome = await shop.state.seal(
                lease.job, lease.shard, lease.fence, self._seq, segment, self._totals()
            )
        except LeaseLost:
            guard.lose()
            raise Released from None
        self._seq += 1
        shop.figures.segments.inc()
        guard.stop = guard.stop or outcome.stop

    async def _keep(self) -> None:
        """Redis lost the job: what is finished becomes a segment all the same, which the rebuild finds."""
        rows, self._finished = self._finished, []
        lease = self._guard.lease
        if rows and lease.shard is not None:
            with suppress(StorageError):
                # Past the number of one that may have been put just now, and not been recorded.
                seq = self._seq + 1
                await asyncio.to_thread(
                    write_segment, self._shop.storage, lease.job, lease.shard, lease.fence, seq, rows
                )

    def _totals(self) -> Totals:
        """The shard's, absolute: a takeover leaves the ledger alone and goes on from here."""
        each = [Totals.of(segment) for segment in self._segments]
        return Totals(*(sum(column) for column in zip(*(totals.as_args() for totals in each), strict=True)))

    # -- the end --------------------------------------------------------------------------------------

    async def _commit(self) -> dict[str, Any]:
        shop, guard, lease = self._shop, self._guard, self._guard.lease
        rows = list(self._finished)
        if self._left:
            assert guard.stop is not None
            rows += [stopped_row(row, guard.stop, self._spec.model) for row in self._left.values()]
        guard.check()
        if self._isolated and not self._left:
            return await self._commit_aside()
        return await shop.insist(
            guard,
            partial(
                commit_shard,
                shop.storage,
                lease.job,
                self._entry,
                fence=lease.fence,
                segments=self._segments,
                rows=rows,
                expected_row_indexes=set(self._rows),
            ),
        )

    async def _commit_aside(self) -> dict[str, Any]:
        """The merge may be what kills workers: it has a process of its own."""
        await self._seal()
        lease = self._guard.lease
        args = {"job": lease.job, "shard": lease.shard, "fence": lease.fence, "segments": self._segments}
        return await Aside(self._shop, self._guard)("commit", args)


def result_row(row: Row, message: Mapping[str, Any], model: str, attempt: int) -> ResultRow:
    """The output row of a completion (wire.py), finished now.

    Raises ValueError, KeyError or TypeError for nonsense.
    """
    common: dict[str, Any] = {
        "row_index": row.row_index,
        "custom_id": row.custom_id,
        "line": row.line,
        "kind": row.kind,
        "prompt_tokens": message.get("prompt_tokens", 0),
        "completion_tokens": message.get("completion_tokens", 0),
        "cached_tokens": message.get("cached_tokens", 0),
        "seed": row.seed,
        "attempt": attempt,
        "queued_ms": message.get("queued_ms"),
        "first_token_ms": message.get("first_token_ms"),
        "total_ms": message.get("total_ms"),
        "model": model,
        "requested_model": row.requested_model,
        "metadata": None if row.metadata is None else to_json(row.metadata),
        "finished_at": round(time.time(), 3),
    }
    if message["status"] == "failed":
        code, what = message["error_code"], str(message["error_message"])
        if row.line is not None and not what.startswith("line "):  # the engine knows no files
            what = f"line {row.line}: {what}"
        return ResultRow(**common, status="failed", error_code=code, error_message=what)
    if message["status"] != "completed":
        raise ValueError(f"status {message['status']}")
    choices = message["choices"]
    first = choices[0]
    return ResultRow(
        **common,
        status="completed",
        text=first["text"],
        choices=choices if len(choices) > 1 else None,
        finish_reason=first["finish_reason"],
        logprobs=first.get("logprobs"),
    )
