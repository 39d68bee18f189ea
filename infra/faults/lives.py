"""What clients do with the jobs of a chaos run, and what they were told: submit, cancel, delete, retry, wait.

Clients are as patient as a careful user: what Redis or the store refuses is tried again, under the same id.
This room may not know who causes the faults.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from faults.workload import ChaosJob

from pagemill.jobs.client import Client
from pagemill.jobs.errors import JobConflict, JobNotFound, RedisUnavailable, StorageError, UsageError
from pagemill.jobs.result import ResultRow
from pagemill.jobs.retry import CHOOSABLE
from pagemill.jobs.status import JobStatus

T = TypeVar("T")
PAUSE_S = 0.3
MODEL = "chaos"


@dataclass
class Life:
    """A job as its client saw it. wrong: what it was told and should not have been."""

    job: ChaosJob
    id: str
    began: float | None = None
    submitted: bool = False  # some submit returned: from here on the job may not get lost
    cancel_accepted: bool | None = None  # None: not asked, or no answer came
    asked_to_stop: bool = False
    deleted: bool = False
    ended: JobStatus | None = None
    over: bool = False
    retry_of: Life | None = None
    retries: list[Life] = field(default_factory=list)
    codes: frozenset[str] = frozenset()
    wrong: list[str] = field(default_factory=list)
    rows: dict[int, ResultRow] = field(default_factory=dict)  # as the inspection has read them


class Clients:
    """Lives the lives of jobs. say: told in one line what happens."""

    def __init__(
        self,
        client: Client,
        other: Client,
        folder: Path,
        variables: dict[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._client, self._other, self._folder, self._env, self._say = client, other, folder, variables, say

    async def live(self, life: Life, began: float) -> None:
        """From submission to the end; returns when nothing is left to be waited for."""
        job = life.job
        await asyncio.sleep(max(0.0, began + job.at - time.monotonic()))
        life.began = time.monotonic()
        self._say(f"{life.id}: {job.sender}, {job.fate}, {len(job.rows)} rows")
        await self._submit(life)
        if not life.submitted:
            return  # vanished: whether there is a job is for the inspection to find out
        if job.fate in ("cancel", "delete"):
            await asyncio.sleep(job.act_after)
            await (self._cancel(life) if job.fate == "cancel" else self._delete(life))
        if job.sender == "again":
            await self._submit_again(life)
        if life.deleted:
            life.over = True
            return
        life.ended = await self.wait(life.id)
        life.over = True
        self._say(f"{life.id}: {life.ended.state}")
        if job.fate in ("retry", "cancel", "expire") and life.ended.failed:
            await self._retry(life)

    async def wait(self, job: str) -> JobStatus:
        """Its end, however long that takes."""
        return await self._insist(lambda: self._client.wait(job), absent_for_now=True)

    async def _insist(self, call: Callable[[], Awaitable[T]], *, absent_for_now: bool = False) -> T:
        """absent_for_now: a job that is not found was forgotten by Redis, and comes back."""
        while True:
            try:
                return await call()
            except (RedisUnavailable, StorageError):
                pass
            except JobNotFound:
                if not absent_for_now:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def _submit(self, life: Life) -> None:
        job = life.job
        if job.sender in ("vanishing", "vanished"):
            await self._vanish(life)
            if job.sender == "vanished":
                return
        if job.sender == "twice":
            terms = {"model": MODEL, "idempotency_key": job.key, **job.terms}
            one, two = await asyncio.gather(
                self._insist(lambda: self._client.submit(job.data, **terms)),
                self._insist(lambda: self._other.submit(job.data, **terms)),
            )
            if {one.id, two.id} != {life.id}:
                life.wrong.append(f"its idempotency key gave the jobs {one.id} and {two.id}")
        else:
            await self._insist(
                lambda: self._client.submit(job.data, model=MODEL, job_id=life.id, **job.terms)
            )
        life.submitted = True

    async def _vanish(self, life: Life) -> None:
        """A process that submits, killed in the middle of it."""
        path = self._folder / f"{life.id}.jsonl"
        path.write_bytes(life.job.data)
        flags = [f"--{name}={value}" for name, value in life.job.terms.items()]
        code = "from pagemill.jobs.cli import main; main()"
        words = [
            sys.executable,
            "-c",
            code,
            "submit",
            str(path),
            f"--model={MODEL}",
            f"--job-id={life.id}",
            *flags,
        ]
        process = await asyncio.create_subprocess_exec(
            *words, env=self._env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(life.job.vanish_after):
                await process.wait()
        except TimeoutError:
            self._say(f"{life.id}: its client vanishes")
            process.kill()
            await process.wait()
        life.submitted = process.returncode == 0

    async def _submit_again(self, life: Life) -> None:
        job = life.job
        terms = {"model": MODEL, "job_id": life.id, **job.terms}
        try:
            again = await self._insist(lambda: self._client.submit(job.data, **terms))
        except JobConflict as error:
            if not life.deleted:
                life.wrong.append(f"the same job under its id is refused: {error}")
            return
        if not again.existed or life.deleted:
            life.wrong.append("the same job under its id was taken for a new one")
        try:
            await self._insist(lambda: self._client.submit(job.data + b'{"prompt": "more"}\n', **terms))
            life.wrong.append("another input under its id is not refused")
        except JobConflict:
            pass

    async def _cancel(self, life: Life) -> None:
        life.asked_to_stop = True
        outcome = await self._insist(lambda: self._client.cancel(life.id), absent_for_now=True)
        life.cancel_accepted = outcome.accepted
        self._say(f"{life.id}: cancel {'accepted' if outcome.accepted else 'refused'}, {outcome.state}")

    async def _delete(self, life: Life) -> None:
        async def once() -> None:
            try:
                await self._client.delete(life.id, force=True)
            except JobConflict:  # not ended within its patience
                raise RedisUnavailable("later") from None

        life.asked_to_stop = True
        await self._insist(once, absent_for_now=True)
        life.deleted = True
        self._say(f"{life.id}: deleted")

    async def _retry(self, life: Life) -> None:
        codes = CHOOSABLE - {"poison_row"}
        again = Life(life.job, f"{life.id}-again", began=time.monotonic(), retry_of=life, codes=codes)
        try:
            await self._insist(lambda: self._client.retry_failed(life.id, codes=codes, job_id=again.id))
        except UsageError:  # only rows that fail again
            return
        life.retries.append(again)
        again.submitted = True
        again.ended = await self.wait(again.id)
        again.over = True
        self._say(f"{again.id}: {again.ended.state}")


__all__ = ["MODEL", "Clients", "Life"]
