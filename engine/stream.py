"""The engine in a thread of its own, and asyncio in front of it.

    event loop                             engine thread
    ----------                             -------------
    submit, stream, abort --> inbox ---->  take the inbox, step, take the inbox, step, ...
    futures, readers <------ call_soon_threadsafe, once for a step that has something to tell

The engine thread never waits for a consumer, and what it hands over can't pile up without bound: there is
one completion at most for each request that somebody submitted, and the deltas of a slow reader are merged
into one. `generate` limits how much it submits ahead; nothing else needs a limit, so nothing can deadlock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from pagemill.engine.engine import Engine
from pagemill.engine.errors import EngineFailed
from pagemill.engine.metrics import EngineMetrics
from pagemill.engine.request import Completion, Delta, Request, Timings, Usage

log = logging.getLogger(__name__)

# How old the snapshot that `metrics()` returns may be.
_SNAPSHOT_S = 0.25


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request
    stream: bool


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True, eq=False)
class _Caller:
    """Who waits for a request, and how to tell them. Called in the event loop only.

    Each is itself alone: an id that is free again may be somebody else's request.
    """

    request: Request
    done: Callable[[Completion], None]
    news: Callable[[Delta], None] | None = None


class AsyncEngine:
    """Any number of concurrent callers over one engine. All methods belong to the event loop of `start`.

    A consumer that stops reading, is cancelled or disappears costs the others nothing: its requests are
    aborted and the engine goes on. When a step raises, every outstanding request ends with
    `engine_error`, `failure` keeps the exception, and further calls raise EngineFailed.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self._ready = threading.Condition()
        self._inbox: deque[_Add | _Abort] = deque()  # one queue, so that order is kept between the two
        self._closing = False
        self._ended = False
        self._callers: dict[str, _Caller] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._snapshot = engine.metrics()
        self._snapshot_at = 0.0

    @property
    def healthy(self) -> bool:
        """Whether requests are being served: started, not failed, not closed."""
        return self._thread is not None and self._thread.is_alive() and not self._ended

    async def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("This engine has been started already.")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="pagemill-engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Abort what is outstanding (its callers get their `abort` completions) and end the thread."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            await asyncio.sleep(0)  # the deliveries that the thread left behind run first

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def metrics(self) -> EngineMetrics:
        """Counters and rates, at most a quarter of a second old while the engine runs, a second when idle."""
        return self._snapshot

    def submit(self, request: Request) -> asyncio.Future[Completion]:
        """Hand a request in. The future always gets a completion; cancelling it aborts the request.

        Raises EngineFailed when the engine has failed or is closed, ValueError for an id in flight.
        """
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        caller = _Caller(request, done=lambda completion: _resolve(future, completion))
        self._send(caller)
        future.add_done_callback(lambda f: self._leave(caller) if f.cancelled() else None)
        return future

    def abort(self, request_id: str) -> None:
        """End a request at once; its caller gets what there is, as `abort`. Unknown ids are ignored."""
        if request_id in self._callers:
            self._post(_Abort(request_id))

    async def generate(
        self, requests: AsyncIterable[Request] | Iterable[Request], *, ahead: int | None = None
    ) -> AsyncIterator[Completion]:
        """Yield completions as they finish. Leaving early aborts what is outstanding.

        ahead: most requests submitted and not yet yielded; 16 full batches unless given. With more of them
        the engine sees more shared prefixes, with fewer it needs less memory.
        """
        finished: asyncio.Queue[Completion | None] = asyncio.Queue()  # None: the feeder has ended
        slots = asyncio.Semaphore(ahead or 16 * self.engine.limits.max_num_seqs)
        mine: set[_Caller] = set()  # what has not ended

        def hand_in(request: Request) -> None:
            def done(completion: Completion) -> None:
                mine.discard(caller)
                finished.put_nowait(completion)

            caller = _Caller(request, done)
            self._send(caller)
            mine.add(caller)

        async def feed() -> None:
            async for request in _each(requests):
                await slots.acquire()
                hand_in(request)

        feeder = asyncio.create_task(feed())
        feeder.add_done_callback(lambda _: finished.put_nowait(None))
        fed = False
        try:
            while mine or not fed or not finished.empty():
                completion = await finished.get()
                if completion is None:
                    fed = True
                    feeder.result()  # raises what the source of requests raised
                    continue
                slots.release()
                yield completion
        finally:
            feeder.cancel()
            for caller in mine:
                self._leave(caller)

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        """Yield tokens and text as they come; the last delta carries the completion.

        The texts of all deltas joined are the completion's text. A reader slower than the engine gets
        several tokens in one delta. Leaving early aborts the request.
        """
        reader = _Reader(request.request_id)
        caller = _Caller(request, done=reader.finish, news=reader.take)
        self._send(caller)
        try:
            while not reader.ended:
                yield await reader.read()
        finally:
            self._leave(caller)

    def _send(self, caller: _Caller) -> None:
        if self._ended or self._closing:
            why = f"it failed: {self.failure}" if self.failure is not None else "it is closed"
            raise EngineFailed(f"The engine takes no more requests; {why}.")
        if self._thread is None:
            raise EngineFailed("The engine takes no requests yet; it has not been started.")
        if caller.request.request_id in self._callers:
            raise ValueError(f"A request {caller.request.request_id!r} is already in flight.")
        self._callers[caller.request.request_id] = caller
        self._post(_Add(caller.request, stream=caller.news is not None))

    def _leave(self, caller: _Caller) -> None:
        """Abort the caller's own request, if it has not ended."""
        request_id = caller.request.request_id
        if self._callers.get(request_id) is caller:
            self.abort(request_id)

    def _post(self, message: _Add | _Abort) -> None:
        with self._ready:
            self._inbox.append(message)
            self._ready.notify()

    # In the event loop, called by the engine thread.

    def _deliver(self, completions: list[Completion], deltas: list[Delta]) -> None:
        for delta in deltas:
            caller = self._callers.get(delta.request_id)
            if caller is not None and caller.news is not None:
                caller.news(delta)
        for completion in completions:
            finished = self._callers.pop(completion.request_id, None)
            if finished is not None:
                finished.done(completion)

    def _settle(self, failure: BaseException | None, last: list[Completion], deltas: list[Delta]) -> None:
        """The thread has ended, with these for news. Whoever waits beyond them is told so too: what they had
        sent was never seen. Nobody is told before `_ended` is set, or they might send more."""
        self._ended = True
        self.failure = failure
        self._deliver(last, deltas)
        for caller in list(self._callers.values()):
            self._deliver([_unserved(caller.request, failure)], [])

    # In the engine thread.

    def _run(self) -> None:
        failure: BaseException | None = None
        last: list[Completion] = []
        try:
            self._serve()
        except BaseException as error:
            failure = error
            log.exception("The engine failed; every outstanding row ends with engine_error.")
            last = self.engine.fail_all(f"The engine failed: {error!r}")
        finally:
            deltas = self.engine.take_deltas()
            self._call(lambda: self._settle(failure, last, deltas))

    def _serve(self) -> None:
        engine = self.engine
        while not self._orphaned():
            # Looked at once a round, and before the inbox is taken: nothing is sent after `close`.
            closing = self._closing
            for message in self._next_messages():
                if isinstance(message, _Add):
                    engine.add(message.request, stream=message.stream)
                else:
                    engine.abort(message.request_id)
            if closing:
                engine.abort_all()
            if engine.has_work:
                self._hand_over(engine.step())
            self._look()
            if closing:
                return

    def _next_messages(self) -> list[_Add | _Abort]:
        """What came in since the last step; with nothing to run, wait for it."""
        with self._ready:
            if not self._inbox and not self._closing and not self.engine.has_work:
                # A second at most: rates fall to zero when nothing runs, and the snapshot should show it.
                self._ready.wait(timeout=1.0)
            messages = list(self._inbox)
            self._inbox.clear()
        return messages

    def _hand_over(self, completions: list[Completion]) -> None:
        """Give the event loop what a step brought."""
        deltas = self.engine.take_deltas()
        if completions or deltas:
            self._call(lambda: self._deliver(completions, deltas))

    def _orphaned(self) -> bool:
        """Whether the event loop went away without `close`: nobody is left to work for."""
        return self._loop is None or self._loop.is_closed()

    def _call(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # closed at this moment
            self._loop.call_soon_threadsafe(function)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._snapshot_at >= _SNAPSHOT_S or not self.engine.has_work:
            self._snapshot, self._snapshot_at = self.engine.metrics(), now


class _Reader:
    """One stream's unread news, merged into a single delta however long nobody reads."""

    def __init__(self, request_id: str) -> None:
        self.ended = False
        self._request_id = request_id
        self._news = asyncio.Event()
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._completion: Completion | None = None

    def take(self, delta: Delta) -> None:
        self._tokens.extend(delta.token_ids)
        self._text.append(delta.text)
        self._news.set()

    def finish(self, completion: Completion) -> None:
        self._completion = completion
        self._news.set()

    async def read(self) -> Delta:
        await self._news.wait()
        self._news.clear()
        delta = Delta(self._request_id, tuple(self._tokens), "".join(self._text), self._completion)
        self._tokens.clear()
        self._text.clear()
        self.ended = self._completion is not None
        return delta


async def _each(requests: AsyncIterable[Request] | Iterable[Request]) -> AsyncIterator[Request]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
        return
    for request in requests:
        yield request
        await asyncio.sleep(0)  # a plain iterator never gives way by itself


def _resolve(future: asyncio.Future[Completion], completion: Completion) -> None:
    if not future.done():
        future.set_result(completion)


def _unserved(request: Request, failure: BaseException | None) -> Completion:
    return Completion(
        request_id=request.request_id,
        text="",
        token_ids=(),
        finish_reason="abort" if failure is None else "error",
        usage=Usage(len(request.prompt_token_ids), 0),
        timings=Timings(time.monotonic()),
        error_code=None if failure is None else "engine_error",
        error_message=None if failure is None else f"The engine failed: {failure!r}",
    )
