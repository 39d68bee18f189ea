"""The client without async, for scripts, notebooks, Django and Flask: one event loop in a thread, and no
second copy.

    with SyncClient("redis://host:6379/0", "s3://bucket/prefix") as client:
        job = client.submit("prompts.jsonl", model="llama")
        job.wait()
        for row in job.results():
            print(row.row_index, row.text or row.error_message)

Each method here is the async one of the same name, with its arguments and its documentation, run to its end
in the thread. Safe to share between threads, and to keep across a fork (a child gets a thread of its own).
This room may not know what the methods do.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from pagemill.jobs.client import PATIENCE_S, Client
from pagemill.jobs.job import POLL_S, AnyJob, CancelOutcome, Job
from pagemill.jobs.reading import Results
from pagemill.jobs.status import JobStatus
from pagemill.jobs.storage import StorageOptions
from pagemill.jobs.terms import When

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])


class Loop:
    """An event loop in a daemon thread, and a way to wait for what runs there."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagemill client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Ctrl-C while waiting cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """The iterator's items, one at a time; it is closed when the caller stops early."""
        try:
            while True:
                try:
                    yield self.run(_next(items))
                except StopAsyncIteration:
                    return
        finally:
            if (close := getattr(items, "aclose", None)) is not None:
                self.run(close())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)


def _blocking(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient, P], T]:
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        client, loop = self._running()
        return loop.run(method(client, *args, **kwargs))

    return _like(method, call)


def _iterating(
    method: Callable[Concatenate[Client, P], AsyncIterator[T]],
) -> Callable[Concatenate[SyncClient, P], Iterator[T]]:
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        client, loop = self._running()
        return loop.iterate(method(client, *args, **kwargs))

    theirs = str(inspect.signature(method).return_annotation)
    return _like(method, call, returns=theirs.removeprefix("Async"))


def _handing(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, Job]],
) -> Callable[Concatenate[SyncClient, P], SyncJob]:
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> SyncJob:
        client, loop = self._running()
        job = loop.run(method(client, *args, **kwargs))
        return SyncJob(job.id, self, job.existed)

    return _like(method, call, returns="SyncJob")


def _like(method: Callable[..., Any], call: C, *, returns: str | None = None) -> C:
    """`call` with the method's name, arguments and documentation; type checkers keep the signature that it
    has here. returns: what `help` says that it gives, where that is not what the method gives."""
    update_wrapper(call, method)
    if returns is not None:
        told = inspect.signature(method).replace(return_annotation=returns)
        call.__signature__ = told  # type: ignore[attr-defined]
    return call


_OF_PARENTS: list[tuple[Client, Loop]] = []


class SyncClient:
    """`Client` for code without async; see there for arguments and errors. Close it, or use `with`."""

    def __init__(
        self,
        redis_url: str | None = None,
        store: str | None = None,
        *,
        storage_options: StorageOptions | None = None,
        patience: float = PATIENCE_S,
    ) -> None:
        self._make: Callable[[], Client] = partial(
            Client, redis_url, store, storage_options=storage_options, patience=patience
        )
        self._client = self._make()
        self._loop: Loop | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets the connections and the thread go; the next call would start them again."""
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is not None and loop.pid == os.getpid():
                with contextlib.suppress(Exception):
                    loop.run(self._client.close())
                loop.close()

    submit = _handing(Client.submit)
    status = _blocking(Client.status)
    openai_batch = _blocking(Client.openai_batch)
    watch = _iterating(Client.watch)
    wait = _blocking(Client.wait)
    cancel = _blocking(Client.cancel)
    delete = _blocking(Client.delete)
    retry_failed = _handing(Client.retry_failed)
    list = _blocking(Client.list)
    workers = _blocking(Client.workers)
    recover = _blocking(Client.recover)
    recover_all = _blocking(Client.recover_all)

    def results(self, job: AnyJob, *, partial: bool = False) -> Results:
        """The job's rows in input order: iterate, or `.dicts()`, `.list()`, `.table()` (Arrow), `.batches()`,
        `.reader()`, `.pandas()`, `.write("answers.csv")`; see `Client.results`."""
        return self._client.results(job, partial=partial).sync

    def _running(self) -> tuple[Client, Loop]:
        with self._lock:
            if self._loop is None or self._loop.pid != os.getpid():
                if self._loop is not None:
                    # Forked: the thread stayed in the parent. Sockets and poll set are shared with it, so
                    # letting ours go would take them out of its hands too.
                    _OF_PARENTS.append((self._client, self._loop))
                    self._client = self._make()
                self._loop = Loop()
            return self._client, self._loop


@dataclass(frozen=True, slots=True)
class SyncJob:
    """A submitted job: its id, and the client's methods with the id filled in. existed: see `Job`."""

    id: str
    client: SyncClient = field(repr=False, compare=False)
    existed: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return self.id

    def status(self) -> JobStatus:
        """See `Client.status`."""
        return self.client.status(self.id)

    def watch(self, *, poll: float = POLL_S) -> Iterator[JobStatus]:
        """See `Client.watch`."""
        return self.client.watch(self.id, poll=poll)

    def wait(self, *, timeout: float | None = None, check: bool = False) -> JobStatus:
        """See `Client.wait`."""
        return self.client.wait(self.id, timeout=timeout, check=check)

    def results(self, *, partial: bool = False) -> Results:
        """See `Client.results`."""
        return self.client.results(self.id, partial=partial)

    def cancel(self) -> CancelOutcome:
        """See `Client.cancel`."""
        return self.client.cancel(self.id)

    def delete(self, *, force: bool = False) -> None:
        """See `Client.delete`."""
        self.client.delete(self.id, force=force)

    def retry_failed(
        self,
        *,
        codes: Collection[str] | None = None,
        job_id: str | None = None,
        deadline: When | None = None,
    ) -> SyncJob:
        """See `Client.retry_failed`."""
        return self.client.retry_failed(self.id, codes=codes, job_id=job_id, deadline=deadline)
