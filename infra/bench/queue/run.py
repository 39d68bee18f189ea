"""One load run: servers, workers, a job from its submission to its last row read, and what each stage took.

    validating     plan        the CPU of all workers while the job is in that state
    in_progress    read        a clock around reading a shard's object
                   hand over   the rest of the workers' CPU in this state, and the threads of the engine's
                               processes that are not the engine: rows down, completions up, leases, progress
                   seal        a clock around making and putting a segment
                   commit      a clock around merging, putting and checking a part
    finalizing     finalize    the CPU of all workers in this state

The simulated engine's own thread, Redis and the S3 server are shown beside them, and are no part of the sum.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from processes import children, cpu_seconds, main_thread_seconds, peak_mb, reset_peak
from rows import write_rows
from servers import RedisServer, S3Server

HERE = Path(__file__).parent
MODEL = "load"
POLL_S = 0.01
START_S = 60.0
PHASES = ("validating", "in_progress", "finalizing")
WORK = ("submit", "plan", "read", "hand over", "seal", "commit", "finalize")


@dataclass
class Place:
    """Servers, a store and a scratch folder that end with the run."""

    folder: Path
    redis: RedisServer
    s3: S3Server | None
    env: dict[str, str]
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def client(self) -> redis.Redis[str]:
        return redis.Redis.from_url(self.redis.url, decode_responses=True)

    def server_cpu(self) -> dict[str, float]:
        """CPU seconds of the servers, by name."""
        found = {}
        for name, server in (("redis", self.redis), ("s3", self.s3)):
            if server is not None and server.process is not None:
                found[name] = cpu_seconds(server.process.pid)
        return found

    def start(self, **settings: Any) -> subprocess.Popen[bytes]:
        """A worker on the simulated engine, once it leases shards."""
        number = len(self.workers)
        log = self.folder / f"worker-{number}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "stages.py"), "worker", str(self.clocks(number))],
                env={**self.env, **variables({"worker_id": f"w{number}", **settings})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.workers.append(process)
        deadline = time.monotonic() + START_S
        while b"engine ready" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"a worker did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        return process

    def clocks(self, number: int) -> Path:
        return self.folder / f"clocks-{number}.json"

    def tool(self, *words: str) -> dict[str, Any]:
        """What a client process of stages.py printed."""
        command = [sys.executable, str(HERE / "stages.py"), *words]
        done = subprocess.run(command, env=self.env, stdout=subprocess.PIPE, check=True)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def stop(self) -> None:
        """Ends all workers as a deploy does."""
        for worker in self.workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGCONT)
                worker.send_signal(signal.SIGTERM)
        for worker in self.workers:
            try:
                worker.wait(15)
            except subprocess.TimeoutExpired:
                worker.kill()


def variables(settings: Mapping[str, Any]) -> dict[str, str]:
    return {f"PAGEMILL_{name.upper()}": str(value) for name, value in settings.items()}


@contextmanager
def place(store: str, folder: Path) -> Iterator[Place]:
    """A Redis, and a local folder or an S3 server, in `folder`, which is removed afterwards."""
    with ExitStack() as stack:
        folder.mkdir(parents=True)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "redis").mkdir()
        (folder / "tmp").mkdir()
        server = RedisServer(folder / "redis")
        server.start()
        stack.callback(server.kill)
        env = {**os.environ, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
        env |= variables({"redis_url": server.url, "store": folder / "store", "model": MODEL})
        env |= variables({"engine": "simulated", "sim_output_chars": 500})
        s3 = None
        if store == "s3":
            (folder / "s3").mkdir()
            s3 = S3Server(folder / "s3")
            s3.start()
            stack.callback(s3.kill)
            env |= _s3_variables(s3)
        here = Place(folder, server, s3, env)
        stack.callback(here.stop)
        yield here


def _s3_variables(server: S3Server) -> dict[str, str]:
    address = server.address
    return {
        **variables({"store": f"{address.url}/load", "s3_endpoint": address.endpoint}),
        "AWS_REGION": str(address.region),
        "AWS_ACCESS_KEY_ID": str(address.access_key),
        "AWS_SECRET_ACCESS_KEY": str(address.secret_key),
    }


@dataclass
class Snapshot:
    """CPU seconds so far: of each worker, of its engine's process without and with the engine's thread."""

    at: float
    workers: float
    wire: float
    engine: float
    servers: dict[str, float]

    @classmethod
    def of(cls, here: Place) -> Snapshot:
        engines = [child for worker in here.workers for child in children(worker.pid)]
        main = sum(main_thread_seconds(pid) for pid in engines)
        return cls(
            time.time(),
            sum(cpu_seconds(worker.pid) for worker in here.workers),
            sum(cpu_seconds(pid) for pid in engines) - main,
            main,
            here.server_cpu(),
        )


def load_run(rows: int, workers: int, store: str, folder: Path, row_bytes: int = 500) -> dict[str, Any]:
    """Everything that one run says, as plain JSON values."""
    with place(store, folder) as here:
        file = here.folder / "input.jsonl"
        size = write_rows(file, rows, row_bytes)
        for _ in range(workers):
            here.start()
        first = Snapshot.of(here)
        submitting = subprocess.Popen(
            [sys.executable, str(HERE / "stages.py"), "submit", str(file), MODEL, "load-run"],
            env=here.env,
            stdout=subprocess.PIPE,
        )
        timeline = follow(here, "load-run", rows)
        answer, _ = submitting.communicate()
        submitted = json.loads(answer)
        last = Snapshot.of(here)
        file.unlink()
        read = here.tool("results", "load-run")
        if (read["rows"], read["rows_in_batches"]) != (rows, rows):
            raise SystemExit(f"{rows} rows went in and {read['rows']} came out")
        peaks = [peak_mb(worker.pid) for worker in here.workers]
        here.stop()
        clocks: Counter[str] = Counter()
        for number in range(workers):
            clocks.update(json.loads(here.clocks(number).read_text()))
        return {
            "rows": rows,
            "workers": workers,
            "store": store,
            "input_bytes": size,
            **_figures(rows, timeline, submitted, clocks, read),
            "other_cpu_us_a_row": _others(rows, first, last),
            "peak_mb": {
                "client": round(submitted["peak_mb"]),
                "planner": round(timeline.planner_mb),
                "worker": round(max(peaks)),
                "reader": round(max(read["as_rows"]["peak_mb"], read["as_batches"]["peak_mb"])),
            },
        }


@dataclass
class Timeline:
    """When the job entered each state and left the last one, and when its leases and rows moved."""

    entered: dict[str, Snapshot] = field(default_factory=dict)
    first_lease: float = 0.0
    first_shard: float = 0.0
    last_sealed: float = 0.0
    last_committed: float = 0.0
    planner_mb: float = 0.0


def follow(here: Place, job: str, rows: int) -> Timeline:
    """Watches a job through Redis to its end."""
    timeline, connection, key = Timeline(), here.client(), f"pagemill:{{{job}}}"
    while not connection.exists(key):
        time.sleep(POLL_S)
    for worker in here.workers:
        reset_peak(worker.pid)
    while True:
        state, done, shards, shards_done = connection.hmget(
            key, "state", "completed", "shards_total", "shards_done"
        )
        now = time.time()
        if state not in timeline.entered:
            timeline.entered[state] = Snapshot.of(here)
            if state == "in_progress":
                timeline.planner_mb = max(peak_mb(worker.pid) for worker in here.workers)
                for worker in here.workers:
                    reset_peak(worker.pid)
        if not timeline.first_lease and connection.exists(f"{key}:leases"):
            timeline.first_lease = now
        if not timeline.first_shard and state == "in_progress" and connection.exists(f"{key}:leases"):
            timeline.first_shard = now
        if not timeline.last_sealed and int(done) == rows:
            timeline.last_sealed = now
        if not timeline.last_committed and int(shards) and shards_done == shards:
            timeline.last_committed = now
        if state in ("completed", "failed", "expired", "cancelled"):
            if state != "completed":
                raise SystemExit(f"the job ended as {state}: {connection.hgetall(key)}")
            return timeline
        time.sleep(POLL_S)


def _figures(
    rows: int,
    timeline: Timeline,
    submitted: Mapping[str, float],
    clocks: Mapping[str, float],
    read: Mapping[str, Any],
) -> dict[str, Any]:
    at = dict(timeline.entered)
    # A phase shorter than the time between two looks was never seen: it began, and ended, when the next was.
    for phase, following in reversed(list(zip(PHASES, (*PHASES[1:], "completed"), strict=True))):
        at.setdefault(phase, at[following])
    ends = {name: at[following] for name, following in zip(PHASES, (*PHASES[1:], "completed"), strict=True)}
    spent = {name: ends[name].workers - at[name].workers for name in PHASES}
    wire = ends["in_progress"].wire - at["in_progress"].wire
    shards = sum(clocks.values())
    cpu = {
        "submit": submitted["cpu_seconds"],
        "plan": spent["validating"],
        "read": clocks["read"],
        "hand over": spent["in_progress"] - shards + wire,
        "seal": clocks["seal"],
        "commit": clocks["commit"],
        "finalize": spent["finalizing"],
    }
    each = {name: round(seconds / rows * 1e6, 1) for name, seconds in cpu.items()}
    running = at["in_progress"].at
    created = at["validating"].at
    walls = {
        "submit": submitted["wall_seconds"],
        "plan": running - created,
        "run": timeline.last_committed - running,
        "finalize": at["completed"].at - at["finalizing"].at,
        "read as rows": read["as_rows"]["wall_seconds"],
    }
    return {
        "cpu_us_a_row": {
            **each,
            "sum": round(sum(cpu.values()) / rows * 1e6, 1),
            "results as rows": round(read["as_rows"]["cpu_seconds"] / rows * 1e6, 1),
            "results as batches": round(read["as_batches"]["cpu_seconds"] / rows * 1e6, 1),
        },
        "rows_a_second": {
            "planned": round(rows / walls["plan"]),
            "sealed": round(rows / (timeline.last_sealed - running)),
            "committed": round(rows / walls["run"]),
        },
        "wall_seconds": {name: round(seconds, 2) for name, seconds in walls.items()},
        "end_to_end_seconds": round(at["completed"].at - created + submitted["wall_seconds"], 2),
        "submit_to_first_lease_ms": round((timeline.first_lease - created) * 1000, 1),
        "submit_to_first_shard_ms": round((timeline.first_shard - created) * 1000, 1),
    }


def _others(rows: int, first: Snapshot, last: Snapshot) -> dict[str, float]:
    spent = {"engine": last.engine - first.engine}
    spent |= {name: last.servers[name] - first.servers[name] for name in last.servers}
    return {name: round(seconds / rows * 1e6, 1) for name, seconds in spent.items()}
