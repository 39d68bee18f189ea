"""A job becomes known: its input goes to the store, then job.json, then its state to Redis, then one ticket.

    input.<nonce>.jsonl      a crash after it leaves an orphan that nothing names
    unfinished/…             tells workers where to look should Redis forget the job
    job.json, put-if-absent  the decision: from here on the id means this job and no other
    Redis state, ticket      a crash before them is mended by submitting the same again

The input's key carries a nonce, so that two senders of one id can never overwrite each other's bytes. Sending
a job again under its id is the same job when everything that decides its rows is equal, and a conflict
otherwise. This room may not know how anybody waits for the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from pagemill.jobs import layout
from pagemill.jobs.errors import JobConflict, ObjectNotFound, UsageError
from pagemill.jobs.inputs import Source
from pagemill.jobs.spec import InputRef, JobSpec
from pagemill.jobs.storage import Storage, decide, encode_json
from pagemill.jobs.wrong_value import wrong_value

T = TypeVar("T")
GRACE_S = 2.0
# What people call the fields that make two jobs differ.
IDENTITY = {
    "model": "model",
    "defaults": "parameters",
    "seed": "seed",
    "context": "context",
    "strict": "strictness",
    "model_policy": "model policy",
    "special_tokens_in_content": "handling of special tokens",
}


class OtherJob(JobConflict):
    """The id belongs to a job that differs from the one submitted; `what` names how."""

    def __init__(self, message: str, what: str) -> None:
        super().__init__(message)
        self.what = what


def build_spec(job: str, source: InputRef, fields: Mapping[str, Any]) -> JobSpec:
    """The job's document; UsageError names the field that cannot be."""
    try:
        return JobSpec(job=job, input=source, **fields)
    except ValidationError as error:
        raise UsageError(wrong_value(error, JobSpec) + ".") from None


def read_spec(storage: Storage, job: str) -> JobSpec | None:
    """job.json as accepted, or None where the store has no such job."""
    try:
        return JobSpec.load(storage.get(layout.job(job)))
    except ObjectNotFound:
        return None


async def accept(
    storage: Storage,
    source: Source,
    job: str,
    fields: Mapping[str, Any],
    *,
    chosen: bool,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[JobSpec, bool]:
    """Puts input and job.json; returns the job that the id means and whether it was there before.

    chosen: the id comes from the caller, so somebody may have used it. Raises JobConflict when it means
    another job, or one that was deleted.
    """
    build_spec(job, InputRef(key="-", size=0, etag=""), fields)  # what is wrong is said before anything moves
    known = await asyncio.to_thread(_known, storage, job) if chosen else None
    if known is not None:
        measured = await in_daemon_thread(lambda stop: _measure(source, stop, progress))
        same_job(known, build_spec(job, measured, fields))
        return known, True
    reference = await in_daemon_thread(lambda stop: _upload(storage, source, job, stop, progress))
    return await asyncio.to_thread(_settle_identity, storage, build_spec(job, reference, fields))


def same_job(known: JobSpec, asked: JobSpec) -> None:
    """Raises JobConflict, naming what differs, unless both are one job."""
    if known.digest() == asked.digest():
        return
    before, after = known.model_dump(), asked.model_dump()
    differs = [words for name, words in IDENTITY.items() if before[name] != after[name]]
    if (known.input.size, known.input.sha256) != (asked.input.size, asked.input.sha256):
        differs.insert(0, "input")
    what = " and ".join(differs) or "limits"
    raise OtherJob(f"Job {known.job} exists already with other {what}; choose another {_name(asked)}.", what)


def _name(asked: JobSpec) -> str:
    """What whoever submitted it called the job by."""
    return "id" if asked.idempotency_key is None else "idempotency key"


def _known(storage: Storage, job: str) -> JobSpec | None:
    if storage.head(layout.tombstone(job)) is not None:
        raise JobConflict(f"Job {job} was deleted, and ids are not used twice; choose another id.")
    return read_spec(storage, job)


def _settle_identity(storage: Storage, spec: JobSpec) -> tuple[JobSpec, bool]:
    storage.put(layout.hint(spec.model, spec.job), b"")
    document, ours = decide(storage, layout.job(spec.job), spec.model_dump(mode="json"))
    if ours:
        return spec, False
    # Another sender was faster: our copy of the input is one that nothing names.
    storage.delete([spec.input.key])
    known = JobSpec.load(encode_json(document))
    same_job(known, spec)
    return known, True


def _upload(
    storage: Storage, source: Source, job: str, stop: threading.Event, progress: Callable[[int], None]
) -> InputRef:
    key = layout.input(job, f".{secrets.token_hex(4)}.jsonl{source.suffix}")
    meter = _Meter(source, stop, progress)
    info = storage.put_stream(key, meter.chunks())
    return InputRef.model_validate(
        {"key": key, "size": info.size, "etag": info.etag, "name": source.name, "suffix": source.suffix,
         "sha256": meter.hash.hexdigest()}
    )  # fmt: skip


def _measure(source: Source, stop: threading.Event, progress: Callable[[int], None]) -> InputRef:
    """What an upload of this source would be, without one: enough to tell whether it is the known input."""
    meter = _Meter(source, stop, progress)
    for _ in meter.chunks():
        pass
    return InputRef.model_validate(
        {
            "key": "-",
            "size": meter.size,
            "etag": "",
            "suffix": source.suffix,
            "sha256": meter.hash.hexdigest(),
        }
    )


class _Meter:
    """Counts and hashes what passes, and ends the stream when its caller has gone."""

    def __init__(self, source: Source, stop: threading.Event, progress: Callable[[int], None]) -> None:
        self.hash = hashlib.sha256()
        self.size = 0
        self._source = source
        self._stop = stop
        self._progress = progress

    def chunks(self) -> Iterator[bytes]:
        for chunk in self._source.chunks():
            if self._stop.is_set():
                raise asyncio.CancelledError
            self.hash.update(chunk)
            self.size += len(chunk)
            self._progress(len(chunk))
            yield chunk
        if self._stop.is_set():  # an end that came of being interrupted is not the input's
            raise asyncio.CancelledError


async def in_daemon_thread(work: Callable[[threading.Event], T]) -> T:
    """`work` in a thread of its own, told by the event when nobody waits any more.

    Not the loop's pool: a pool is joined when the program ends, and a thread that waits for standard input
    would hold a program that was interrupted until somebody types.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    stop = threading.Event()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work(stop)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    thread = threading.Thread(target=run, name="pagemill upload", daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        # A short while to take back what was half uploaded; a thread that waits for input is left behind.
        stop.set()
        await asyncio.to_thread(thread.join, GRACE_S)
        raise
