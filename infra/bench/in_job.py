"""The engine's speed inside a job against its speed alone, in turns.

    python infra/bench/in_job.py --rows 128 --rounds 3 --json out/bench/in-job.json

Alone is engine.py in a process of its own. Inside a job the same rows go through everything that users have:
a private Valkey, a client that submits them, a worker that plans, leases, seals and commits in a folder.
Its clock runs from the end of the plan to the last commit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure
import workloads

HERE = Path(__file__).parent
LOOK_S = 0.02


def alone(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    out = folder / "alone.json"
    words = [
        sys.executable,
        str(HERE / "engine.py"),
        "--workload",
        options.workload,
        "--rows",
        str(options.rows),
    ]
    words += ["--dtype", options.dtype, "--threads", str(options.threads), "--model", options.model]
    words += ["--workloads", str(options.workloads), "--json", str(out)]
    subprocess.run(words, check=True, stderr=subprocess.DEVNULL)
    record = json.loads(out.read_text())
    return {name: record[name] for name in ("output_tokens_per_second", "seconds", "other_cores")}


async def in_a_job(options: argparse.Namespace, items: list[workloads.Item], folder: Path) -> dict[str, Any]:
    from pagemill.jobs.client import Client
    from pagemill.worker.embedded import embedded_redis, embedded_worker
    from pagemill.worker.settings import WorkerSettings

    store = str(folder / "store")
    rows = [
        {"prompt": list(item.prompt), "max_tokens": item.max_tokens, "ignore_eos": True, "temperature": 0}
        for item in items
    ]
    async with embedded_redis() as address:
        settings = WorkerSettings(
            redis_url=address,
            store=store,
            model=options.model,
            dtype=options.dtype,
            threads=options.threads,
        )
        async with embedded_worker(settings) as worker, Client(address, store) as client:
            with measure.Watch() as watch:
                job = await client.submit(rows, model=settings.model_name)
                planned = await state_of(client, job, worker, ("in_progress", "finalizing", "completed"))
                ended = await state_of(client, job, worker, ("finalizing", "completed"))
            status = await client.wait(job)
            made = sum([row.completion_tokens or 0 async for row in client.results(job)])
    wanted = sum(item.max_tokens for item in items)
    if status.state != "completed" or made != wanted:
        raise RuntimeError(f"The job is {status.state} with {made} of {wanted} tokens.")
    seconds = ended - planned
    return {
        "output_tokens_per_second": round(made / seconds, 2),
        "seconds": round(seconds, 3),
        "other_cores": watch.other_cores,
    }


async def state_of(client: Any, job: str, worker: asyncio.Task[None], states: Sequence[str]) -> float:
    """When the job was first seen in one of the states."""
    while (await client.status(job)).state not in states:
        if worker.done():
            await worker
        await asyncio.sleep(LOOK_S)
    return time.perf_counter()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare the engine in a job with the engine alone.")
    add = parser.add_argument
    add("--workload", default="W1", choices=workloads.NAMES)
    add("--model", default="smollm2")
    add("--dtype", default="float32")
    add("--rows", type=int, default=128)
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=measure.cores())
    add("--workloads", type=Path, default=Path("out/bench/workloads"))
    add("--json", type=Path, required=True)
    options = parser.parse_args(words)
    from pagemill.worker.models import resolve_model

    workloads.ensure(options.workloads, resolve_model(options.model))
    items = workloads.read(options.workloads, options.workload, options.rows, None)
    runs: dict[str, list[dict[str, Any]]] = {"alone": [], "in a job": []}
    for number in range(options.rounds):
        # Who goes first changes from round to round.
        for name in sorted(runs, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory() as folder:
                if name == "alone":
                    run = alone(options, Path(folder))
                else:
                    run = asyncio.run(in_a_job(options, items, Path(folder)))
            runs[name].append(run)
            print(f"round {number + 1}, {name}: {run['output_tokens_per_second']} tokens/s", file=sys.stderr)
    medians = {
        name: statistics.median(run["output_tokens_per_second"] for run in found)
        for name, found in runs.items()
    }
    record = {
        "ratio": round(medians["in a job"] / medians["alone"], 3),
        "output_tokens_per_second": medians,
        "runs": runs,
        "settings": {
            name: getattr(options, name) for name in ("workload", "rows", "dtype", "threads", "rounds")
        },
        "command": measure.command_line(),
        "machine": measure.machine(),
    }
    measure.save(options.json, record)
    print(f"in a job / alone: {record['ratio']}", file=sys.stderr)


if __name__ == "__main__":
    main()
