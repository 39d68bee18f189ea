"""Work that has killed a worker runs in a process of its own: planning, merging, ending a job.

A lease that ends without a sign is a strike. A plan or an ending with one, and the merge of a shard in
isolation, may be what kills (a library that crashes on the file, a machine without the memory). So they are
done by `python -m pagemill.worker.aside_child`, with a limit to its memory, and first in line for the kernel
when memory runs out. Its death is counted in the task's record, which outlives us all; after DEATHS of them
the job fails and says what to do. What is done then is what cannot crash: a stopped plan reads no input, and
nothing is merged or checked.

This room may not know engines, nor how tasks are leased.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pagemill.jobs import errors
from pagemill.jobs.commit import RowsDoNotMatch
from pagemill.jobs.errors import PagemillError, StorageError
from pagemill.jobs.settle import WORKS
from pagemill.jobs.state import LeaseLost
from pagemill.jobs.status import Lease
from pagemill.jobs.stopping import stop_job
from pagemill.worker.lease import Guard, Released
from pagemill.worker.workshop import Workshop

log = logging.getLogger("pagemill.worker")

DEATHS = 3
TICK_S = 0.25
DOING = {"plan": "Planning", "finalize": "Ending the job", "shard": "Merging", "commit": "Merging"}
REMEDY = {
    "plan": "split the input, or look for a line that no library can read",
    "finalize": "its committed parts are listed unchecked in the manifest; read them with care",
    "shard": "its sealed rows are given up",
    "commit": "its sealed rows are given up",
}


class Crashed(PagemillError):
    """The process that did the work died of it."""


class Aside:
    """Does the works of one lease (`jobs.settle.Elsewhere`)."""

    def __init__(self, shop: Workshop, guard: Guard) -> None:
        self._shop, self._guard = shop, guard

    @property
    def _lease(self) -> Lease:
        return self._guard.lease

    async def __call__(self, work: str, args: dict[str, Any]) -> dict[str, Any]:
        """What the work decided. Raises what it raises; Crashed while it may be tried again."""
        record = await self._record()
        why = record.get("why", "")
        if record.get("deaths", 0) < DEATHS:
            try:
                return await self._in_child(work, args)
            except Crashed as crash:
                why = str(crash)
                record |= {"deaths": record.get("deaths", 0) + 1, "why": why}
                await self._note(record)
                if record["deaths"] < DEATHS:
                    raise
        return await self._give_up(work, args, f"{why} It did so {DEATHS} times")

    async def _give_up(self, work: str, args: dict[str, Any], why: str) -> dict[str, Any]:
        shop, lease = self._shop, self._lease
        memory = "give workers more memory (PAGEMILL_TASK_MEMORY_GB)"
        message = f"{why}, the last time on worker {shop.settings.worker_id}: {memory}; {REMEDY[work]}."
        log.error("%s of %s is given up: %s", lease.task, lease.job, message)
        failure = {"error_code": "task_crashed", "error_message": message}
        if work == "finalize":
            args = {**args, "gave_up": failure}
        else:
            await stop_job(shop.state, shop.storage, lease.job, "failed", **failure)
        if work == "commit":
            work, args = "shard", {**args, "reason": "failed"}
        if work == "shard":
            args = {**args, "segments": []}
        return await asyncio.to_thread(WORKS[work], shop.storage, **args)

    async def _record(self) -> dict[str, Any]:
        text, _ = await self._shop.state.trial(self._lease.job, self._lease.task)
        record: dict[str, Any] = json.loads(text) if text else {}
        return record

    async def _note(self, record: dict[str, Any]) -> None:
        lease = self._lease
        try:
            await self._shop.state.note_trial(
                lease.job, lease.task, lease.fence, json.dumps(record), trying=False
            )
        except LeaseLost:
            self._guard.lose()
            raise Released from None

    async def _in_child(self, work: str, args: dict[str, Any]) -> dict[str, Any]:
        settings = self._shop.settings
        order = {
            "store": settings.store,
            "options": asdict(settings.storage_options()),
            "memory_bytes": int(settings.task_memory_gb * (1 << 30)),
            "work": work,
            "args": args,
        }
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pagemill.worker.aside_child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        log.info("%s of %s: %s in process %d", self._lease.task, self._lease.job, work, child.pid)
        assert child.stdin is not None and child.stdout is not None
        answering = asyncio.create_task(child.stdout.read())
        try:
            with suppress(ConnectionError):
                child.stdin.write(json.dumps(order).encode() + b"\n")
                await child.stdin.drain()
            while not answering.done():
                self._guard.check()
                await asyncio.wait({answering}, timeout=TICK_S)
            answer = answering.result()
            code = await child.wait()
        finally:
            answering.cancel()
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        if not answer.endswith(b"\n"):
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise Crashed(f"{DOING[work]} {how} in a process of its own.")
        return _read(work, json.loads(answer), settings.task_memory_gb, self._lease)


def _read(work: str, answer: dict[str, Any], memory_gb: float, lease: Lease) -> dict[str, Any]:
    """The decision, or what was raised in the child."""
    if "decided" in answer:
        decided: dict[str, Any] = answer["decided"]
        return decided
    kind, message = answer["raised"], answer["message"]
    if kind == "MemoryError":
        raise Crashed(f"{DOING[work]} needed more than {memory_gb:g} GiB of memory.")
    if kind == "RowsDoNotMatch":
        assert lease.shard is not None
        raise RowsDoNotMatch(lease.job, lease.shard, set(answer["missing"]), set(answer["unexpected"]))
    raised = getattr(errors, kind, None)
    if isinstance(raised, type) and issubclass(raised, StorageError):
        raise raised(message, transient=answer["transient"])
    raise PagemillError(message)
