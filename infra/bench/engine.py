"""Runs our engine over one workload and writes what came of it.

    python infra/bench/engine.py --workload W1 --model smollm2 --dtype float32 --json out/bench/w1.json

The engine is driven as anybody would, `build_engine` and an `AsyncEngine` over it, with all rows handed in
at once. The clock runs from the first row handed in to the last completion, text included. Loading and a few
warm-up rows come before and are stated apart. README.md says what each number means.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure
import reference
import workloads

if TYPE_CHECKING:
    from pagemill.engine import Completion, EngineConfig, EngineMetrics, Request
    from pagemill.engine.engine import Engine

WARM_UP_ROWS = 8
# What a step's time splits into; the counters of EngineMetrics bear these names.
PARTS = ("schedule", "prepare", "forward", "sample", "finish")
#: What of it is not the model's arithmetic.
HOST = ("schedule", "prepare", "sample")


@dataclass(slots=True)
class Run:
    """What one run gave. before, after: the engine's counters around it."""

    completions: list[Completion]
    seconds: float
    before: EngineMetrics
    after: EngineMetrics
    watch: measure.Watch


def arguments(words: Sequence[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description="Run our engine over one workload.")
    add = parser.add_argument
    add("--workload", required=True, choices=workloads.NAMES)
    add("--model", default="smollm2", help="smollm2, a directory or a .gguf file")
    add("--dtype", default="auto")
    add("--quantization", help="int8: weights of eight bits")
    add("--no-prefix-cache", action="store_true", help="compute every prompt in full")
    add("--kv-cache-gb", type=float, default=1.0)
    add("--max-num-tokens", type=int, help="token budget of a step")
    add("--max-num-seqs", type=int, help="most rows at once")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="any other field of EngineConfig")
    add("--threads", type=int, default=measure.cores())
    add("--rows", type=int, help="only the first rows of the workload")
    add("--max-tokens", type=int, help="at most so many tokens a row")
    add("--workloads", type=Path, default=Path("out/bench/workloads"), help="where they are, or get written")
    add("--reference", type=Path, help="compare with the tokens that reference.py wrote")
    add("--outputs", type=Path, help="write the tokens here")
    add("--json", type=Path, required=True)
    return parser, parser.parse_args(words)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig, but the model; raises ValueError for one that this engine doesn't have."""
    chosen: dict[str, Any] = {
        "dtype": options.dtype,
        "kv_cache_gb": options.kv_cache_gb,
        "max_num_tokens": options.max_num_tokens,
        "max_num_seqs": options.max_num_seqs,
        "threads": options.threads,
    }
    if options.no_prefix_cache:
        chosen["prefix_cache"] = False
    if options.quantization is not None:
        chosen["quantization"] = options.quantization
    for pair in options.set:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set wants NAME=VALUE, not {pair!r}.")
        chosen[name] = _value(value)
    from pagemill.engine import EngineConfig

    known = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
    if unknown := sorted(chosen.keys() - known):
        raise ValueError(f"This engine has no {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
    return chosen


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def request_of(item: workloads.Item) -> Request:
    from pagemill.engine import Request, SamplingParams

    sampling = SamplingParams(max_tokens=item.max_tokens, temperature=0.0, ignore_eos=True)
    return Request(item.id, item.prompt, sampling)


async def first_token(engine: Engine) -> float:
    """Seconds from the start of this process to its first token; what is left of that row runs to its end."""
    from pagemill.engine.stream import AsyncEngine

    age: float | None = None
    async with AsyncEngine(engine) as serving:
        (item,) = workloads.warm_up(1)
        async for delta in serving.stream(request_of(item)):
            if age is None and delta.token_ids:
                age = measure.process_age()
    assert age is not None
    return age


async def timed(engine: Engine, items: Sequence[workloads.Item]) -> Run:
    from pagemill.engine.stream import AsyncEngine

    requests = [request_of(item) for item in items]
    before = engine.metrics()
    with measure.Watch() as watch:
        async with AsyncEngine(engine) as serving:
            started = time.perf_counter()
            completions = [c async for c in serving.generate(requests, ahead=len(requests))]
            seconds = time.perf_counter() - started
    return Run(completions, seconds, before, engine.metrics(), watch)


def check_lengths(items: Sequence[workloads.Item], completions: Sequence[Completion]) -> None:
    """Raises RuntimeError when a row did not do all of its work: its time would count for nothing."""
    wanted = {item.id: item.max_tokens for item in items}
    for completion in completions:
        if len(completion.token_ids) != wanted.pop(completion.request_id):
            why = completion.error_message or completion.finish_reason
            raise RuntimeError(f"Row {completion.request_id} ended early: {why}")
    if wanted:
        raise RuntimeError(f"{len(wanted)} rows never came back, {min(wanted)} among them.")


def figures(run: Run) -> dict[str, Any]:
    """The numbers of a run."""
    made = sum(c.usage.completion_tokens for c in run.completions)
    given = sum(c.usage.prompt_tokens for c in run.completions)
    steps = run.after.steps - run.before.steps
    spent = {p: getattr(run.after, f"{p}_seconds") - getattr(run.before, f"{p}_seconds") for p in PARTS}
    in_steps = sum(spent.values()) or 1.0
    return {
        "output_tokens_per_second": round(made / run.seconds, 2),
        "total_tokens_per_second": round((made + given) / run.seconds, 2),
        "seconds": round(run.seconds, 3),
        "rows": len(run.completions),
        "output_tokens": made,
        "prompt_tokens": given,
        "cached_tokens": sum(c.usage.cached_tokens for c in run.completions),
        "identical_rows": run.after.identical_rows - run.before.identical_rows,
        "steps": steps,
        "output_tokens_per_step": round(made / max(steps, 1), 2),
        "preemptions": run.after.preemptions - run.before.preemptions,
        "step_seconds": {part: round(seconds, 4) for part, seconds in spent.items()},
        "host_share_of_steps": round(sum(spent[part] for part in HOST) / in_steps, 4),
        "peak_rss_mb": round(run.watch.peak_mb, 1),
        "own_cores": run.watch.own_cores,
        "other_cores": run.watch.other_cores,
    }


def about(engine: Engine, chosen: dict[str, Any]) -> dict[str, Any]:
    """What ran: the settings as given, and what they were resolved to."""
    import torch

    limits, info = engine.limits, engine.model_info
    resolved = {
        "dtype": info.dtype,
        "num_blocks": info.num_blocks,
        "max_num_tokens": limits.max_num_tokens,
        "max_num_seqs": limits.max_num_seqs,
        "prefix_cache": limits.prefix_cache,
        "prefix_order": limits.prefix_order,
        "long_rows_first": limits.long_rows_first,
        "learned_lengths": limits.learned_lengths,
        "identical_rows": limits.identical_rows,
    }
    return {
        "engine": "pagemill",
        "version": f"pagemill {version('pagemill')}, torch {torch.__version__}",
        "model": info.name,
        "settings": {**{name: value for name, value in chosen.items() if value is not None}, **resolved},
    }


def measured(
    config: EngineConfig, chosen: dict[str, Any], items: list[workloads.Item]
) -> tuple[Run, dict[str, Any]]:
    """Loads, warms up, runs."""
    from pagemill.engine.engine import build_engine

    with measure.Watch() as start:
        began = time.perf_counter()
        engine = build_engine(config)
        load_seconds = time.perf_counter() - began
        first = asyncio.run(first_token(engine))
        began = time.perf_counter()
        asyncio.run(timed(engine, workloads.warm_up(WARM_UP_ROWS)))
        warm_up_seconds = time.perf_counter() - began
    run = asyncio.run(timed(engine, items))
    check_lengths(items, run.completions)
    started = {
        "load_seconds": round(load_seconds, 3),
        "first_token_seconds": round(first, 3),
        "warm_up_seconds": round(warm_up_seconds, 3),
        "start_peak_rss_mb": round(start.peak_mb, 1),
    }
    return run, {**about(engine, chosen), **figures(run), **started}


def main(words: Sequence[str] | None = None) -> None:
    parser, options = arguments(words)
    # Libraries of threads read it when they load; a worker tells its engine's process the same.
    from pagemill.worker.threads import thread_variables

    os.environ.update(thread_variables(options.threads))
    from pagemill.engine import EngineConfig, EngineError
    from pagemill.jobs.errors import PagemillError
    from pagemill.worker.models import resolve_model

    try:
        chosen = settings(options)
        model = resolve_model(options.model)
        workloads.ensure(options.workloads, model)
        items = workloads.read(options.workloads, options.workload, options.rows, options.max_tokens)
        run, record = measured(EngineConfig(model=str(model), **chosen), chosen, items)
        outputs = {c.request_id: c.token_ids for c in run.completions}
        record |= {
            "workload": options.workload,
            "max_tokens": options.max_tokens,
            "workload_sha256": workloads.digest(options.workloads, options.workload),
            "command": measure.command_line(),
            "machine": measure.machine(),
        }
        if options.reference is not None:
            of = options.workload, record["workload_sha256"]
            record["reference"] = reference.compare(outputs, options.reference, *of)
    except (ValueError, OSError, EngineError, PagemillError, RuntimeError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if options.outputs is not None:
        measure.save(options.outputs, outputs)
    measure.save(options.json, record)
    print(f"{options.workload}: {record['output_tokens_per_second']} output tokens/s", file=sys.stderr)


if __name__ == "__main__":
    main()
