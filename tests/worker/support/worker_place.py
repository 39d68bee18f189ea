"""A place for workers to work in: a Redis, a store, a model's name, and processes that end with the test."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagemill.jobs.client import Client, Job
from pagemill.jobs.result import ResultRow
from pagemill.jobs.script import connection
from pagemill.jobs.state import State
from pagemill.jobs.status import JobStatus
from pagemill.jobs.storage import Storage, open_storage
from pagemill.worker.embedded import embedded_worker
from pagemill.worker.settings import WorkerSettings


async def eventually(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until it is; a test that needs the whole time has failed."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.02)


@dataclass
class WorkerProcess:
    """`python -m pagemill.worker.main`, with its log in a file."""

    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        return self.log.read_text()

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    async def ended(self, seconds: float = 60.0) -> int:
        """Its exit code."""
        await eventually(lambda: self.process.poll() is not None, seconds)
        return self.process.returncode

    async def ready(self) -> WorkerProcess:
        await eventually(lambda: "engine ready" in self.said() or self.process.poll() is not None)
        assert self.process.poll() is None, self.said()
        return self

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = map(int, children)
        return pid


@dataclass
class Place:
    """One Redis, one store, and a model name that nobody else uses."""

    redis_url: str
    store: str
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    model: str = field(default_factory=lambda: f"m-{uuid.uuid4().hex[:10]}")
    processes: list[WorkerProcess] = field(default_factory=list)

    @property
    def sim_log(self) -> Path:
        return self.folder / "computed"

    def settings(self, **more: Any) -> WorkerSettings:
        """Short times, so that what takes a lease to notice takes two seconds."""
        usual: dict[str, Any] = {
            "redis_url": self.redis_url,
            "store": self.store,
            "model": self.model,
            "engine": "simulated",
            "lease_ttl_s": 2.0,
            "seal_rows": 10,
            "seal_seconds": 0.5,
            "sim_log": self.sim_log,
        }
        return WorkerSettings(**{**usual, **more})

    @asynccontextmanager
    async def worker(self, **more: Any) -> AsyncIterator[asyncio.Task[None]]:
        """A worker in this process, ready; it hands back and ends with the block."""
        async with embedded_worker(self.settings(**more)) as task:
            yield task

    def spawn(self, **more: Any) -> WorkerProcess:
        """A worker in a process of its own, not yet ready."""
        given = self.settings(**more).model_dump(mode="json", exclude={"worker_id"}, exclude_none=True)
        texts = {n: ",".join(v) if isinstance(v, list) else str(v) for n, v in given.items()}
        env = {f"PAGEMILL_{name.upper()}": text for name, text in texts.items()}
        log = self.folder / f"worker-{len(self.processes)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "pagemill.worker.main"],
                env={**os.environ, **env, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.processes.append(WorkerProcess(process, log))
        return self.processes[-1]

    def client(self) -> Client:
        return Client(self.redis_url, self.store, storage_options=self.settings().storage_options())

    def storage(self) -> Storage:
        return open_storage(self.store, self.settings().storage_options())

    @asynccontextmanager
    async def state(self) -> AsyncIterator[State]:
        state = State(connection(self.redis_url), patience_s=20)
        yield state
        await state.close()

    def computed(self) -> Counter[int]:
        """How often the simulated engines have computed each row, by row index."""
        if not self.sim_log.exists():
            return Counter()
        rids = self.sim_log.read_text().split()
        return Counter(int(rid.rpartition("/")[2]) for rid in rids if not rid.endswith("canary"))


def end_all(place: Place) -> None:
    for worker in place.processes:
        if worker.process.poll() is None:
            worker.process.send_signal(signal.SIGCONT)
            worker.process.kill()
        worker.process.wait()


async def rows_of(client: Client, job: Job) -> list[ResultRow]:
    return [row async for row in client.results(job)]


async def whole(place: Place, client: Client, job: Job, count: int, seconds: float = 60) -> list[ResultRow]:
    """The rows of a job that completed: one a line, in order, and counts that agree."""
    status = await client.wait(job, timeout=seconds)
    assert status.state == "completed", status
    rows = await rows_of(client, job)
    assert [row.row_index for row in rows] == list(range(count))
    agree(status, rows)
    return rows


def agree(status: JobStatus, rows: list[ResultRow]) -> None:
    counts = Counter(row.status for row in rows)
    assert (status.total, status.completed, status.failed) == (
        len(rows),
        counts["completed"],
        counts["failed"],
    )
