"""What the job layer costs: many rows through real workers, a real Redis and a real store, without a model.

    python infra/bench/queue --rows 1000000 --workers 2 [--store local|s3] [--json FILE]
    python infra/bench/queue --scale 50000,100000,200000 --workers 1,2 --plot FILE.svg
    python infra/bench/queue --plan --rows 10000000 --row-bytes 100
    python infra/bench/queue --latency

A folder and no file: a module queue.py beside the other scripts would be theirs as Python's own `queue`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]  # measure.py, servers.py

import measure  # noqa: E402
from latency import latency_run  # noqa: E402
from planning import plan_run  # noqa: E402
from plot import plot  # noqa: E402
from run import WORK, load_run  # noqa: E402


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="infra/bench/queue", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=_numbers, default=[20_000], help="rows of the job; several: N,N,…")
    parser.add_argument("--workers", type=_numbers, default=[2], help="worker processes; several: K,K,…")
    parser.add_argument("--row-bytes", type=int, default=500, help="bytes of an input line")
    parser.add_argument("--store", choices=("local", "s3"), default="local")
    parser.add_argument(
        "--scale", action="store_true", help="each of --rows with each of --workers, as a table"
    )
    parser.add_argument("--plan", action="store_true", help="submit and plan --rows, and run none of them")
    parser.add_argument("--latency", action="store_true", help="how soon work starts, and is taken over")
    parser.add_argument("--folder", type=Path, default=None, help="for everything temporary (1 KB a row)")
    parser.add_argument("--json", type=Path, help="write what was measured here")
    parser.add_argument("--plot", type=Path, help="draw what --scale measured into this SVG file")
    return parser.parse_args(words)


def _numbers(text: str) -> list[int]:
    numbers = [int(word.replace("_", "")) for word in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("numbers must be 1 or more")
    return numbers


def main() -> int:
    args = arguments()
    with (
        tempfile.TemporaryDirectory(prefix="pagemill-load-", dir=args.folder) as folder,
        measure.Watch() as watch,
    ):
        if args.latency:
            runs: list[dict[str, Any]] = [latency_run(args.store, Path(folder) / "latency")]
        elif args.plan:
            runs = [
                plan_run(rows, args.store, Path(folder) / str(rows), args.row_bytes) for rows in args.rows
            ]
        else:
            runs = [
                load_run(rows, workers, args.store, Path(folder) / f"{rows}-{workers}", args.row_bytes)
                for rows, workers in product(args.rows, args.workers)
            ]
    print(table(runs) if args.scale else "\n".join(json.dumps(run, indent=2) for run in runs))
    document = {
        "command": measure.command_line(["python", "infra/bench/queue", *sys.argv[1:]]),
        "machine": measure.machine(),
        "other_cores": watch.other_cores,
        "runs": runs,
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        args.plot.write_text(plot(runs))
    return 0


def table(runs: Sequence[dict[str, Any]]) -> str:
    """One run a line: where its CPU time went, in µs a row, and how long it took."""
    head = ["rows", "workers", *WORK, "sum", "s end to end", "rows/s run"]
    lines = [head]
    for run in runs:
        cpu = run["cpu_us_a_row"]
        costs = [f"{cpu[name]:.0f}" for name in (*WORK, "sum")]
        ends = [f"{run['end_to_end_seconds']:.1f}", f"{run['rows_a_second']['committed']}"]
        lines.append([f"{run['rows']:,}", str(run["workers"]), *costs, *ends])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(word.rjust(w) for word, w in zip(line, widths, strict=True)) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
