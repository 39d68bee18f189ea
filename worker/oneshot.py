"""`pagemill run`: one file, one machine, nothing else installed, and a killed run goes on when run again.

    DIR/jobs/<job>/…             the store: results, manifest, everything that a job is
    DIR/.pagemill-run/run.json   which job this folder is for, written before anything else
    DIR/.pagemill-run/seconds    how long it has been running, in all its runs
    DIR/.pagemill-run/redis/     the private Valkey's append-only file
    DIR/.pagemill-run/worker.log

The folder names its job, so the same command finds it again: an ended one is reported, an unfinished one goes
on, and another input, model or parameter is refused, since its rows would be mixed with these. This room may
not know how the command line is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pagemill.jobs import layout
from pagemill.jobs.client import Client
from pagemill.jobs.columns import Columns
from pagemill.jobs.errors import JobConflict, JobFailed, StorageError, UsageError
from pagemill.jobs.failures import interruptible
from pagemill.jobs.inputs import ROWS, Prompts, open_source
from pagemill.jobs.progress import Follower
from pagemill.jobs.publish import output_file
from pagemill.jobs.recent import RecentErrors
from pagemill.jobs.remembered import remembered
from pagemill.jobs.render import say
from pagemill.jobs.spec import JobSpec, default_seed, new_job_id
from pagemill.jobs.status import JobStatus
from pagemill.jobs.storage import Storage, open_storage
from pagemill.jobs.submission import OtherJob, accept
from pagemill.worker.embedded import embedded_redis, embedded_worker
from pagemill.worker.logs import endure_a_log_that_cannot_be_written
from pagemill.worker.main import cancelled
from pagemill.worker.models import resolve_model
from pagemill.worker.settings import WorkerSettings

STATE_FOLDER = ".pagemill-run"
# How long a run waits for somebody to mend what blocks it. A service waits for ever; here somebody sits.
BLOCKED_S = 10.0
LOOK_S = 1.0
UNSERVED = "no worker serves"


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be run, and how. `store` is the output folder unless another one is named."""

    prompts: Prompts
    name: str | None
    output: Path
    settings: WorkerSettings
    parameters: Mapping[str, Any]
    seed: int | None = None
    strict: bool = False
    new: bool = False
    columns: Columns = ROWS


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended.

    fresh: it ran now, rather than having ended before. seconds: of running, earlier runs that were cut off
    and the model's loading included. seconds_now: of them in this run.
    """

    status: JobStatus
    storage: Storage = field(repr=False)
    fresh: bool
    seconds: float = 0.0
    seconds_now: float = 0.0


async def run_once(order: Order, follower: Follower | None) -> Outcome:
    """Run the order to its end, or find that it has ended. Raises PagemillError in one sentence.

    follower: shows progress; None is quiet.
    """
    folder = _state_folder(order.output)
    with _alone(folder):
        model = await asyncio.to_thread(resolve_model, order.settings.model)
        storage = open_storage(order.settings.store, order.settings.storage_options())
        job = await asyncio.to_thread(_job_of, folder, storage, model, order.new)
        spec, known = await _accepted(order, storage, job)
        if known and await asyncio.to_thread(storage.head, layout.manifest(job)) is not None:
            return Outcome(await asyncio.to_thread(remembered, storage, job), storage, fresh=False)
        if follower is not None:
            what = "Going on with" if known else "Running"
            # Kernels are compiled then; without this word the first minute looks like a hang.
            say(f"{what} job {job} on {spec.model}, which loads first: longest the first time on a machine")
        _log_to(folder / "worker.log")
        clock = _Clock(folder / "seconds", goes_on=known)
        with interruptible("Interrupted; what is finished is kept: run the same command again to go on."):
            status = await _until_ended(order, folder, spec, known, follower, clock)
        return Outcome(status, storage, True, *clock.note())


class _Clock:
    """How long the folder's job has been running, kept in a file, so that a run that is killed counts too."""

    def __init__(self, place: Path, *, goes_on: bool) -> None:
        self._place, self._began, self._before = place, time.monotonic(), 0.0
        if goes_on:
            with contextlib.suppress(OSError, ValueError):
                self._before = max(0.0, float(place.read_text()))
        self.note()

    def note(self) -> tuple[float, float]:
        """Writes it down; seconds in all, and those of this run."""
        now = time.monotonic() - self._began
        with contextlib.suppress(OSError):  # a figure for people is worth no trouble
            # Whole at every moment: a kill would else leave an empty file.
            beside = self._place.with_name(f"{self._place.name}.new")
            beside.write_text(f"{self._before + now:.3f}\n")
            beside.replace(self._place)
        return self._before + now, now


async def _accepted(order: Order, storage: Storage, job: str) -> tuple[JobSpec, bool]:
    settings = order.settings
    fields = {
        "model": settings.model_name,
        "created_at": time.time(),
        "defaults": dict(order.parameters),
        "seed": default_seed(job) if order.seed is None else order.seed,
        "context": settings.context,
        "strict": order.strict,
    }
    source = open_source(order.prompts, settings.storage_options(), name=order.name, columns=order.columns)
    try:
        return await accept(storage, source, job, fields, chosen=True)
    except OtherJob as conflict:
        raise JobConflict(
            f"{order.output} belongs to job {job}, which has other {conflict.what}; choose another --output, "
            "or say --new to begin another job in it."
        ) from None


async def _until_ended(
    order: Order, folder: Path, spec: JobSpec, known: bool, follower: Follower | None, clock: _Clock
) -> JobStatus:
    """The job beside its Redis and its worker, until it has ended or the worker has."""
    async with embedded_redis(folder / "redis") as redis_url:
        settings = order.settings.model_copy(update={"redis_url": redis_url})
        async with Client(redis_url, settings.store, storage_options=settings.storage_options()) as client:
            job = await client.adopt(spec, known=known)
            statuses = _calm(client.watch(job.id))
            following = asyncio.create_task(
                follower.follow(statuses, RecentErrors(client, job.id)) if follower else _last(statuses)
            )
            # Each of these ends early only by raising.
            others = {
                asyncio.create_task(_work(settings)),
                asyncio.create_task(_patience(client, job.id, settings.worker_id, clock)),
            }
            try:
                done, _ = await asyncio.wait({following, *others}, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {following}:
                    if following not in done:
                        await task
                return await following
            finally:
                await _ended(following, *others)


async def _work(settings: WorkerSettings) -> None:
    async with embedded_worker(settings) as worker:
        await worker


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    """All of them, cancelled where they still run; their errors are not asked for."""
    await cancelled(tasks)
    await asyncio.gather(*tasks, return_exceptions=True)


async def _last(statuses: AsyncIterator[JobStatus]) -> JobStatus:
    async for status in statuses:
        last = status
    return last


async def _calm(statuses: AsyncIterator[JobStatus]) -> AsyncIterator[JobStatus]:
    """Without the word that nobody serves the model: our worker is on its way."""
    async for status in statuses:
        yield replace(status, blocked_reason="") if status.blocked_reason.startswith(UNSERVED) else status


async def _patience(client: Client, job: str, worker: str, clock: _Clock) -> None:
    """Ends by raising, when our own worker, the only one there is, cannot go on with the job."""
    since: float | None = None
    while True:
        await asyncio.sleep(LOOK_S)
        clock.note()
        status = await client.status(job)
        reason = status.blocked_reason
        if not reason or status.terminal or reason.startswith(UNSERVED):
            since = None
            continue
        since = since or time.monotonic()
        if f"worker {worker} is refused" in reason:
            raise JobConflict(
                f"The job cannot go on with this model as it is now: {reason}; choose another --output, "
                "or say --new."
            )
        if time.monotonic() - since > BLOCKED_S:
            raise StorageError(f"The job is stuck: {reason} Mend it and run the same command again.")


def _state_folder(output: Path) -> Path:
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file; --output names a folder.")
    folder = output / STATE_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"Cannot write into {output}: {error.strerror or error}.") from error
    return folder


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One run at a time in a folder; the system lets go of the lock however the run ends."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"Another run is at work in {folder.parent}; wait, or choose another folder."
            ) from None
        yield
    finally:
        os.close(lock)


def _job_of(folder: Path, storage: Storage, model: Path, new: bool) -> str:
    """The job that this folder is for; it is chosen and written down the first time, or anew.

    One that never came to be, since its input was refused, say, binds the folder to no model.
    """
    place = folder / "run.json"
    found = None if new else _read(place)
    differs = found is not None and found["model"] != str(model.resolve())
    if found is None or (differs and storage.head(layout.job(found["job"])) is None):
        found = {"job": new_job_id(), "model": str(model.resolve())}
        with output_file(place) as file:
            file.write(json.dumps(found, indent=1).encode())
    elif differs:
        raise JobConflict(
            f"{folder.parent} belongs to job {found['job']}, which runs on {found['model']}; "
            "choose another --output, or say --new to begin another job in it."
        )
    return str(found["job"])


def _read(place: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(place.read_bytes())
        return {"job": str(found["job"]), "model": str(found["model"])}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{place} is damaged; choose another --output, or say --new.") from error


def _log_to(path: Path) -> None:
    """The worker's log goes to a file: on the terminal it would tear the progress bar."""
    endure_a_log_that_cannot_be_written()
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s  %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("pagemill").setLevel(logging.INFO)
    logging.getLogger("arq").setLevel(logging.ERROR)


def failed(status: JobStatus) -> JobFailed:
    """The error of a run whose job did not complete."""
    why = f": {status.error_message or status.error_code}" if status.error_code else "."
    return JobFailed(f"Job {status.job} ended as {status.state}{why}", status.error_code)
