"""One chaos run from start to end: servers, proxies, workers, jobs, faults, calm, inspection.

    Redis ◀── proxy ◀──┬── workers (real processes, simulated engine)      storm: strikes all of them
    S3    ◀── proxy ◀──┴── clients                                         lives: submit, cancel, delete, …

Everything that is drawn comes from the seed; what real processes make of it differs from run to run.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from faults.fleet import Fleet
from faults.inspection import Findings, Inspection
from faults.lives import MODEL, Clients, Life
from faults.redis_proxy import FaultyRedis
from faults.s3_proxy import FaultyS3
from faults.schedule import make_schedule
from faults.storm import S3Weather, Storm
from faults.workload import CHARS, make_jobs
from servers import RedisServer, S3Address, s3_address

from pagemill.jobs.client import Client
from pagemill.jobs.storage import StorageOptions

TTL_S = 3.0
LEAVE_S = 20.0
SCRATCH = "pagemill*"


@dataclass(frozen=True)
class Options:
    """gap_s: seconds between faults, on average. drain_s: how long after the last fault all jobs may take."""

    minutes: float
    seed: int
    workers: int = 3
    gap_s: float = 3.0
    jobs_per_minute: float = 20.0
    drain_s: float = 180.0


class Log:
    """One line an event, with its second."""

    def __init__(self, path: Path, loud: bool) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._loud, self._began = loud, time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, sentence: str) -> None:
        line = f"{time.monotonic() - self._began:8.2f}  {sentence}"
        with self._lock:
            print(line, file=self._file, flush=True)
            if self._loud:
                print(line, flush=True)


def run(options: Options, *, loud: bool = False) -> tuple[dict[str, Any], Path | None]:
    """The summary, and the folder of logs and state, which is kept when something is wrong."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    with ExitStack() as stack:
        server = RedisServer(_made(folder / "redis"), durable=True)
        server.start()
        stack.callback(server.kill)
        s3 = stack.enter_context(s3_address())
        log = Log(folder / "log", loud)
        weather = S3Weather(options.seed)
        assert s3.endpoint is not None
        faulty_s3 = stack.enter_context(FaultyS3(s3.endpoint, weather, remember=False))
        faulty_redis = stack.enter_context(FaultyRedis(server.port))
        prefix = f"{s3.url}/chaos-{uuid.uuid4().hex[:8]}"
        through = _variables(faulty_redis.url, faulty_s3.endpoint, prefix, s3)
        fleet = Fleet(_made(folder / "workers"), options.workers, {**through, **_worker_variables()}, log)
        stack.callback(fleet.kill)
        storm = Storm(fleet, server, faulty_redis, weather, log)
        options_s3 = [StorageOptions(endpoint=endpoint, region=s3.region, access_key=s3.access_key,
                                     secret_key=s3.secret_key)
                      for endpoint in (faulty_s3.endpoint, s3.endpoint)]  # fmt: skip
        began = time.monotonic()
        findings, took = asyncio.run(
            _live(options, storm, log, folder, through, prefix, server.url, faulty_redis.url, options_s3)
        )
        _end_workers(fleet, findings)
        summary = _summary(
            options, findings, storm, weather, faulty_redis, took, time.monotonic() - began, fleet
        )
        for sentence in findings.said:
            log(sentence)
        (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    if findings.clean:
        shutil.rmtree(folder, ignore_errors=True)
        return summary, None
    return summary, folder


async def _live(
    options: Options,
    storm: Storm,
    log: Log,
    folder: Path,
    through: dict[str, str],
    store: str,
    redis_url: str,
    faulty_url: str,
    storage: list[StorageOptions],
) -> tuple[Findings, float]:
    """Jobs and faults at once, then calm, then the inspection; and how long it took to drain."""
    seconds = options.minutes * 60
    jobs = make_jobs(
        options.seed, seconds, per_minute=options.jobs_per_minute, kills=round(options.minutes / 2)
    )
    schedule = make_schedule(options.seed, seconds, gap_s=options.gap_s, ttl_s=TTL_S)
    env = {**os.environ, **through}
    async with (
        Client(faulty_url, store, storage_options=storage[0]) as client,
        Client(faulty_url, store, storage_options=storage[0]) as other,
        Client(redis_url, store, storage_options=storage[1]) as unhindered,
    ):
        clients = Clients(client, other, folder, env, log)
        lives = [Life(job, job.id) for job in jobs]
        began = time.monotonic()
        tasks = [asyncio.create_task(clients.live(life, began), name=life.id) for life in lives]
        await asyncio.to_thread(storm.run, schedule, began)
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
        storm.calm()
        calm = time.monotonic()
        await asyncio.wait(tasks, timeout=options.drain_s)
        await _vanished(unhindered, lives, calm + options.drain_s)
        took = time.monotonic() - calm
        inspection = Inspection(unhindered)
        for task in tasks:
            if not task.done():
                inspection.findings.note(
                    "hung", f"{task.get_name()}: its client still waits in {_where(task)}"
                )
                task.cancel()
            elif task.exception() is not None:
                inspection.findings.note("wrong_replies", f"{task.get_name()}: {task.exception()!r}")
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(TTL_S)  # an attempt that was under way when its job ended
        everyone = [each for life in lives for each in (life, *life.retries)]
        return await inspection.look(everyone), took


def _where(task: asyncio.Task[Any]) -> str:
    """The chain of coroutines that a task waits in, the innermost last."""
    names, at = list[str](), task.get_coro()
    while at is not None:
        frame = (
            getattr(at, "cr_frame", None) or getattr(at, "ag_frame", None) or getattr(at, "gi_frame", None)
        )
        names.append(f"{getattr(at, '__qualname__', type(at).__name__)}:{frame.f_lineno if frame else '?'}")
        at = (
            getattr(at, "cr_await", None)
            or getattr(at, "ag_await", None)
            or getattr(at, "gi_yieldfrom", None)
        )
    return " > ".join(names)


async def _vanished(client: Client, lives: list[Life], deadline: float) -> None:
    """Jobs whose client was never heard of again end all the same, if the store has accepted them."""
    for life in lives:
        if life.submitted or life.job.sender != "vanished":
            continue
        if await asyncio.to_thread(client.storage.head, f"jobs/{life.id}/job.json") is None:
            continue
        while time.monotonic() < deadline:
            with suppress(Exception):
                if (await client.status(life.id)).terminal:
                    break
            await asyncio.sleep(0.5)


def _end_workers(fleet: Fleet, findings: Findings) -> None:
    for sentence in fleet.leave(LEAVE_S):
        findings.note("left_behind", sentence)
    for sentence in fleet.unforeseen():
        findings.note("unforeseen", sentence)
    for path in fleet.scratch.glob(SCRATCH):
        findings.note("left_behind", f"scratch: {path.name}")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _variables(redis_url: str, endpoint: str, store: str, s3: S3Address) -> dict[str, str]:
    found = {
        "PAGEMILL_REDIS_URL": redis_url,
        "PAGEMILL_STORE": store,
        "PAGEMILL_S3_ENDPOINT": endpoint,
        "PAGEMILL_S3_REGION": s3.region,
        "PAGEMILL_S3_ACCESS_KEY": s3.access_key,
        "PAGEMILL_S3_SECRET_KEY": s3.secret_key,
    }
    return {name: value for name, value in found.items() if value}


def _worker_variables() -> dict[str, str]:
    """Short times, so that what takes a lease to notice takes two seconds."""
    found = {
        "MODEL": MODEL, "ENGINE": "simulated", "LEASE_TTL_S": TTL_S, "SEAL_ROWS": 20, "SEAL_SECONDS": 0.5,
        "RESCUE_SECONDS": 5, "STALL_TIMEOUT_S": 6, "STALL_TOKEN_S": 0, "MAX_ROWS_IN_FLIGHT": 32,
        "SIM_OUTPUT_CHARS": CHARS, "SIM_DELAY_MS": 150, "SIM_MAX_SEQS": 16, "REDIS_PATIENCE_S": 20,
    }  # fmt: skip
    return {f"PAGEMILL_{name}": str(value) for name, value in found.items()}


def _summary(
    options: Options,
    findings: Findings,
    storm: Storm,
    weather: S3Weather,
    faulty_redis: FaultyRedis,
    drained_s: float,
    took_s: float,
    fleet: Fleet,
) -> dict[str, Any]:
    counts = {name: getattr(findings, name) for name in ("jobs", "rows", *Findings.BAD)}
    return {
        "options": asdict(options),
        "faults": sum(storm.done.values()),
        **counts,
        "drained_s": round(drained_s, 1),
        "took_s": round(took_s, 1),
        "ends": dict(findings.ends),
        "error_codes": dict(findings.codes),
        "faults_by_kind": dict(sorted(storm.done.items())),
        "requests_to_s3_spoiled": dict(sorted(weather.spoiled.items())),
        "replies_of_scripts_lost": faulty_redis.lost,
        "worker_ends": {str(code): count for code, count in sorted(fleet.ends.items())},
        "found": findings.said,
        "python": platform.python_version(),
    }
