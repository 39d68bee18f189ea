"""The client: submit a file of prompts, follow the job, read its results. Async; `SyncClient` is the same in
scripts.

    async with Client("redis://host:6379/0", "s3://bucket/prefix") as client:
        job = await client.submit(["Name a river.", "Name a lake."], model="llama", max_tokens=20)
        await job.wait()
        async for row in job.results():
            print(row.row_index, row.text or row.error_message)

It needs Redis and the store, and no worker to be running: a job waits until somebody serves its model. It may
not know how a row is run.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from pagemill.jobs import layout, tickets
from pagemill.jobs.columns import Columns
from pagemill.jobs.errors import JobConflict, JobFailed, RedisUnavailable
from pagemill.jobs.inputs import Prompts, open_source
from pagemill.jobs.job import POLL_S, AnyJob, CancelOutcome, Job, id_of
from pagemill.jobs.reading import AsyncResults, Results
from pagemill.jobs.remembered import output_url, remembered
from pagemill.jobs.settings import ClientSettings
from pagemill.jobs.spec import JobSpec, default_seed, new_job_id
from pagemill.jobs.state import State
from pagemill.jobs.status import JobStatus, WorkerInfo
from pagemill.jobs.storage import Storage, StorageOptions, open_storage
from pagemill.jobs.submission import accept
from pagemill.jobs.terms import Sampling, When, checked_model, chosen_id, moment, seconds
from pagemill.jobs.watching import watch

PATIENCE_S = 5.0
"""How long one call waits for a Redis that is away. Workers wait longer; a person at a terminal should
not."""
PAGE = 200
END_S = 60.0


class Client:
    """Talks to one Redis and one store. Cheap to make, safe to share within an event loop; close it, or use
    `async with`.

    redis_url: redis://, rediss:// or unix://. store: s3://bucket/prefix, file:///folder, or a folder. Both
    default to PAGEMILL_REDIS_URL and PAGEMILL_STORE, see `pagemill.jobs.settings`; storage_options to
    PAGEMILL_S3_*.
    patience: seconds that one call waits for a Redis that is away before it raises RedisUnavailable.

    Every error is a PagemillError whose text is one sentence: UsageError, JobNotFound, JobConflict,
    StorageError, RedisUnavailable, ProtocolMismatch.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        store: str | None = None,
        *,
        storage_options: StorageOptions | None = None,
        patience: float = PATIENCE_S,
    ) -> None:
        settings = ClientSettings.load(redis_url=redis_url, store=store)
        self.storage_options = storage_options or settings.storage_options()
        self.storage: Storage = open_storage(settings.store, self.storage_options)
        self._redis_url = settings.redis_url
        self._patience = patience
        self._state: State | None = None
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Lets the connections go. The jobs go on."""
        if self._state is not None:
            await self._state.close()
            self._state = None

    async def state(self) -> State:
        """The connected, version-checked state; for those who need more of it than the client shows."""
        async with self._connecting:
            if self._state is None:
                state = await State.connect(self._redis_url, patience_s=self._patience)
                try:
                    await state.check_protocol()
                except BaseException:
                    await state.close()
                    raise
                self._state = state
        return self._state

    async def submit(
        self,
        prompts: Prompts,
        *,
        model: str,
        job_id: str | None = None,
        idempotency_key: str | None = None,
        name: str | None = None,
        prompt_column: str | None = None,
        template: str | None = None,
        id_column: str | None = None,
        chat: bool = False,
        defaults: Mapping[str, Any] | None = None,
        seed: int | None = None,
        priority: int = 0,
        max_shards: int | None = None,
        deadline: When | None = None,
        context: int | None = None,
        strict: bool = False,
        max_rows: int | None = None,
        max_line_bytes: int | None = None,
        shard_rows: int | None = None,
        shard_tokens: int | None = None,
        model_policy: Literal["override", "match"] = "override",
        special_tokens_in_content: Literal["text", "parse", "error"] = "text",
        retention: timedelta | float | None = None,
        progress: Callable[[int], None] | None = None,
        **sampling: Unpack[Sampling],
    ) -> Job:
        """Make a job of these prompts and return its handle; it runs whenever a worker serves its model.

        prompts: a path, an s3:// or file:// URI, a file open for reading bytes, JSONL as bytes, a table, or
            an iterable or async iterable of rows. A row is a string (a raw prompt), a list of token ids, a
            list of messages, or a dict in either line shape, whose parameters come before the job's. A string
            alone is a path; one prompt goes in a list. Everything is streamed: an input of any length is
            submitted in bounded memory.
            Files are JSONL, Parquet (.parquet) or CSV (.csv, .tsv), told apart by their names. A table is
            whatever exports Arrow data: pyarrow, pandas 2.2 and polars frames, record-batch readers.
        model: the name that workers serve it under.
        job_id: chosen by you, so that submitting again after a failure is safe: the same input and parameters
            give the same job (`Job.existed`), anything else raises JobConflict. idempotency_key: the same for
            any text, from which an id is made.
        name: what to call the input; for streams it also says what they are (.csv, .parquet) and how they
            are packed (.gz, .zst).
        prompt_column, template: which column of a table (or key of dicts) is the prompt, or a text with
            `{column}` where cells go. With neither, columns are the fields of a line: `prompt`, `max_tokens`,
            …  A row whose cell is null, or no text, is an error row; a column that is not there raises
            UsageError. id_column: the column of custom_ids.
        chat: a text of a table or of a list becomes a user's message, for the model's chat template, instead
            of a raw prompt.
        sampling, defaults: parameters for rows that set none (`max_tokens=64`, or as one mapping).
        seed: rows without one get theirs from it and their index; by default it follows from the job's id.
        priority: higher goes first. max_shards: most shards run at once, to leave room for others.
        deadline: seconds or a timedelta from now, or a datetime with a zone; rows not done by then end as
            `batch_expired`.
        context: tokens a row needs at most, where less than the model's; smaller workers can then help.
        strict: fail the job for the first bad line instead of giving that line an error row. max_rows: refuse
            longer inputs. max_line_bytes: longer lines are error rows (default 16 MiB).
        shard_rows, shard_tokens: most rows, and about how many tokens, make a shard, which one worker takes.
        model_policy: `override` replaces the model a row names, `match` makes a differing one an error.
        special_tokens_in_content: chat text that spells a control token is text, the token, or an error.
        retention: how long Redis remembers the job after its end (default a week); the store forgets nothing.
        progress: called with the size of each uploaded piece, from another thread.
        """
        chosen = chosen_id(job_id, idempotency_key)
        job = chosen or new_job_id()
        fields = {
            "model": checked_model(model),
            "created_at": time.time(),
            "defaults": {**(defaults or {}), **sampling},
            "seed": default_seed(job) if seed is None else seed,
            "priority": priority,
            "max_shards": max_shards,
            "expires_at": moment(deadline),
            "context": context,
            "strict": strict,
            "max_rows": max_rows,
            "model_policy": model_policy,
            "special_tokens_in_content": special_tokens_in_content,
            "idempotency_key": idempotency_key,
        }
        limits = {
            "max_line_bytes": max_line_bytes,
            "shard_rows": shard_rows,
            "shard_tokens": shard_tokens,
            "retention_s": None if retention is None else int(seconds(retention)),
        }
        fields |= {name: value for name, value in limits.items() if value is not None}
        columns = Columns(prompt_column, template, id_column, chat)
        source = open_source(prompts, self.storage_options, name=name, columns=columns)
        await self.state()  # before the upload: a Redis that is down is told at once
        spec, known = await accept(
            self.storage,
            source,
            job,
            fields,
            chosen=chosen is not None,
            progress=progress or (lambda _: None),
        )
        return await self.adopt(spec, known=known)

    async def adopt(self, spec: JobSpec, *, known: bool) -> Job:
        """Make a job that the store holds known to Redis, and its model's workers told; harmless to repeat.

        known: whether the store had it before. Then it may have ended, which it does once, or be one that
        Redis has lost, or was never told of; that is rebuilt from its objects.
        """
        state = await self.state()
        ended = known and await asyncio.to_thread(self.storage.head, layout.manifest(spec.job)) is not None
        if not ended:
            try:
                if known:
                    await self.recover(spec.job)
                else:
                    await state.create(spec, output_url(self.storage, spec.job))
                await tickets.send(state.redis, spec.model, 1)
            except RedisUnavailable as error:
                raise RedisUnavailable(
                    f"{error} The input is stored as job {spec.job}: submit it again under that id."
                ) from error
        return Job(spec.job, self, existed=known)

    async def recover(self, job: AnyJob) -> bool:
        """Rebuild the state of a job that Redis has lost from its objects; false when Redis knew it.

        Workers do the same by themselves. Raises JobNotFound when the store does not hold it either.
        """
        from pagemill.jobs.recover import restore  # with Arrow, which takes a quarter of a second to load

        return (await restore(await self.state(), self.storage, id_of(job))).rebuilt

    async def recover_all(self) -> builtins.list[str]:
        """Rebuild every unfinished job of the store that Redis has lost; returns their ids."""
        from pagemill.jobs.recover import restore_all

        found = await restore_all(await self.state(), self.storage)
        return [restored.job for restored in found if restored.rebuilt]

    async def status(self, job: AnyJob) -> JobStatus:
        """The job as it is now. One that Redis has forgotten is read from its objects: what is committed,
        or how it ended.

        Raises JobNotFound.
        """
        return (await self.look(id_of(job)))[0]

    async def openai_batch(self, job: AnyJob) -> dict[str, Any]:
        """The job as OpenAI's batch object, which `openai.types.Batch` validates; see
        `pagemill.jobs.openai_batch`. Raises JobNotFound."""
        from pagemill.jobs.openai_batch import batch_of

        return await asyncio.to_thread(batch_of, self.storage, await self.status(job))

    async def look(self, name: str) -> tuple[JobStatus, bool]:
        """The status, and whether Redis has lost the job: its objects may be behind what was shown before."""
        known = await (await self.state()).status(name)
        if known is not None:
            return known, False
        found = await asyncio.to_thread(remembered, self.storage, name)
        return found, not found.terminal

    def watch(self, job: AnyJob, *, poll: float = POLL_S, patience: float = 60.0) -> AsyncIterator[JobStatus]:
        """The status now, then whenever it changed, until the job has ended; the last one is terminal.

        poll: seconds between looks while no event comes. patience: seconds that Redis may be away, or may
        have lost the job while a worker rebuilds it from its objects.
        """
        return watch(self, id_of(job), poll, patience)

    async def wait(
        self,
        job: AnyJob,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (a caller looks for it here)
        check: bool = False,
    ) -> JobStatus:
        """The status that the job ended with: completed, failed, expired or cancelled.

        timeout: seconds, then TimeoutError is raised and the job goes on. check: raise JobFailed when it
        failed.
        """
        name = id_of(job)
        try:
            async with asyncio.timeout(timeout):
                async for status in self.watch(name):
                    last = status
        except TimeoutError:
            raise TimeoutError(f"Job {name} has not ended after {timeout:g} s; it goes on.") from None
        if check and last.state == "failed":
            raise JobFailed(f"Job {name} failed: {last.error_message or last.error_code}", last.error_code)
        return last

    def results(self, job: AnyJob, *, partial: bool = False) -> AsyncResults:
        """The job's rows in input order: `async for row in …`, `async for … in ….dicts()`, `….batches()`
        (Arrow record batches), or whole: `await ….list()`, `.table()` (Arrow), `.pandas()`, or as one file:
        `await ….write("answers.csv")`.

        Read from the store, so also long after Redis has forgotten the job. partial: the committed parts of a
        job that still runs; without it reading one raises JobConflict.
        """
        return AsyncResults(Results(self.storage, id_of(job), partial=partial))

    async def cancel(self, job: AnyJob) -> CancelOutcome:
        """Stop the job: finished rows are kept, the rest become error rows (`batch_cancelled`).

        Running workers drain it within seconds. Where none serves its model, what is left needs no engine and
        is done here. Cancelling again is harmless, and finishes what a worker that died since has left. A job
        that is finalizing or has ended is not cancelled (`accepted` is false). Raises JobNotFound.
        """
        from pagemill.jobs.settle import settle_job  # with Arrow, which takes a quarter of a second to load
        from pagemill.jobs.stopping import stop_job

        name = id_of(job)
        state = await self.state()
        status, lost = await self.look(name)
        if status.terminal:
            return CancelOutcome(status.state, status.state == "cancelled")
        if lost:
            await self.recover(name)
        outcome = await stop_job(state, self.storage, name, "cancelled")
        if not await self._served(status.model):
            await settle_job(state, self.storage, name, status.model)
        status = await self.status(name)
        return CancelOutcome(status.state, outcome.accepted)

    async def delete(self, job: AnyJob, *, force: bool = False) -> None:
        """Delete an ended job with its input and results; its id is not used again. Harmless to repeat.

        force: cancel it first where it has not ended. Raises JobNotFound, JobConflict while it runs.
        """
        from pagemill.jobs.deletion import delete_job

        name, state = id_of(job), await self.state()
        if force and await self._unfinished(name):
            await self.recover(name)
            await self.cancel(name)
            with _as_conflict(f"Job {name} has not ended {END_S:g} s after it was cancelled; try again."):
                await self.wait(name, timeout=END_S)
        await delete_job(state, self.storage, name)

    async def retry_failed(
        self,
        job: AnyJob,
        *,
        codes: Collection[str] | None = None,
        job_id: str | None = None,
        deadline: When | None = None,
    ) -> Job:
        """Make a job of those rows of an ended one that failed and may succeed, with their ids and seeds.

        codes: which error codes to retry; by default rows that were not run (`batch_cancelled`,
        `batch_expired`, `job_failed`), `result_lost` and `engine_error`. The new job's job.json names the old
        one (`retry_of`); the rest of its terms are the old one's. Raises JobNotFound, JobConflict while the
        job has not ended, and UsageError when it has no such rows.
        """
        from pagemill.jobs import retry

        name, chosen = id_of(job), chosen_id(job_id, None)
        wanted = retry.chosen_codes(codes)
        fields = await asyncio.to_thread(retry.terms, self.storage, name)
        rows = await asyncio.to_thread(retry.failed_rows, self.storage, name, wanted)
        source = open_source(rows, self.storage_options, name=f"{name}.failed.jsonl")
        await self.state()
        spec, known = await accept(
            self.storage,
            source,
            chosen or new_job_id(),
            {**fields, "expires_at": moment(deadline)},
            chosen=chosen is not None,
        )
        return await self.adopt(spec, known=known)

    async def _unfinished(self, job: str) -> bool:
        known = await (await self.state()).status(job)
        if known is not None:
            return not known.terminal
        keys = (layout.manifest(job), layout.tombstone(job), layout.job(job))
        ended, deleted, accepted = [
            await asyncio.to_thread(self.storage.head, key) is not None for key in keys
        ]
        return accepted and not ended and not deleted

    async def list(
        self, *, limit: int = 50, state: str | None = None, model: str | None = None
    ) -> builtins.list[JobStatus]:
        """The newest jobs that Redis knows, newest first; of one state or one model where given."""
        redis, found, offset = await self.state(), builtins.list[JobStatus](), 0
        while len(found) < limit:
            page = await redis.list_jobs(max(limit, PAGE), offset)
            found += [s for s in page if state in (None, s.state) and model in (None, s.model)]
            if len(page) < PAGE:
                break
            offset += len(page)
        return found[:limit]

    async def workers(self) -> builtins.list[WorkerInfo]:
        """Workers with a recent heartbeat."""
        return await (await self.state()).workers()

    async def _served(self, model: str) -> bool:
        return any(model in worker.models and worker.state != "sick" for worker in await self.workers())


@contextlib.contextmanager
def _as_conflict(sentence: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise JobConflict(sentence) from None
