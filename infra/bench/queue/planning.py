"""A plan alone, of as many rows as the disk holds: what it takes in time, memory and scratch files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from processes import peak_mb, reset_peak
from rows import write_rows
from run import HERE, MODEL, Snapshot, place

LOOK_S = 0.25


def plan_run(rows: int, store: str, folder: Path, row_bytes: int) -> dict[str, Any]:
    """Submits the rows and waits for their plan; the workers end before they have run many of them."""
    with place(store, folder) as here:
        file = here.folder / "input.jsonl"
        size = write_rows(file, rows, row_bytes)
        worker = here.start()
        connection, key = here.client(), "pagemill:{planned}"
        reset_peak(worker.pid)
        before, began = Snapshot.of(here), time.monotonic()
        submitting = subprocess.Popen(
            [sys.executable, str(HERE / "stages.py"), "submit", str(file), MODEL, "planned"],
            env=here.env,
            stdout=subprocess.PIPE,
        )
        answer, _ = submitting.communicate()
        submitted, spilled = json.loads(answer), 0
        file.unlink()
        while connection.hget(key, "state") == "validating":
            spilled = max(spilled, _size(here.folder / "tmp"))
            time.sleep(LOOK_S)
        took, spent = time.monotonic() - began, Snapshot.of(here).workers - before.workers
        planner_mb = peak_mb(worker.pid)
        status = connection.hgetall(key)
        worker.kill()
        if int(status["total"]) != rows:
            raise SystemExit(f"{rows} rows went in and the plan has {status['total']}: {status}")
        return {
            "rows": rows,
            "store": store,
            "input_bytes": size,
            "shards": int(status["shards_total"]),
            "plan_cpu_us_a_row": round(spent / rows * 1e6, 1),
            "submit_cpu_us_a_row": round(submitted["cpu_seconds"] / rows * 1e6, 1),
            "wall_seconds": {
                "submit": round(submitted["wall_seconds"], 1),
                "submit and plan": round(took, 1),
            },
            "peak_mb": {"client": round(submitted["peak_mb"]), "planner": round(planner_mb)},
            "scratch_bytes": spilled,
        }


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue  # a file that was read to its end goes
    return total
