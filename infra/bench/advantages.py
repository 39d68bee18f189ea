"""What each of the engine's advantages over a server is worth: a workload that shows it, with and without.

    python infra/bench/advantages.py [--only NAME] [--rounds 3] [--threads 2] --json FILE

Each case names a switch of EngineConfig and builds two engines, alike but for it. Rounds alternate between
the two and begin with nothing cached; a case reports medians of each side and the ratios without / with.
Steps and computed tokens are counted and repeat exactly; seconds depend on the machine and on who else uses
it. The workloads are small and made to need what they show: they say what an advantage does, and not how
often its like is met. A switch that this engine does not have is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure

if TYPE_CHECKING:
    from pagemill.engine import Request
    from pagemill.engine.engine import Engine

SEED = 20261130
# Ids that are plain text in every vocabulary worth measuring.
FIRST_ID, LAST_ID = 1_000, 30_000
BLOCK = 16
FIGURES = ("steps", "computed_tokens", "seconds")


@dataclass(frozen=True, slots=True)
class Case:
    """settings: fields of EngineConfig for both sides. make: the rows, from a stream of chance."""

    switch: str
    shows: str
    make: Callable[[random.Random], list[Request]]
    settings: dict[str, Any]


def ids(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


def row(name: str, prompt: Sequence[int], max_tokens: int, ends_after: int | None = None) -> Request:
    """A greedy request that makes max_tokens, or ends of itself after so many."""
    from pagemill.engine import Request, SamplingParams

    if ends_after is None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    else:
        stop = FIRST_ID - 1
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, min_tokens=ends_after - 1,
            stop_token_ids=(stop,), logit_bias=((stop, 1e9),),
        )  # fmt: skip
    return Request(name, tuple(prompt), sampling)


def one_template(chance: random.Random) -> list[Request]:
    template = ids(chance, 24 * BLOCK)
    return [row(f"{n}", [*template, *ids(chance, 12)], 4) for n in range(16)]


def templates_mixed(chance: random.Random) -> list[Request]:
    """Rows of eight templates in turn; memory holds three templates and their rows."""
    templates = [ids(chance, 8 * BLOCK) for _ in range(8)]
    return [row(f"{n}", [*templates[n % 8], *ids(chance, 12)], 4) for n in range(48)]


def many_alike(chance: random.Random) -> list[Request]:
    prompts = [ids(chance, 40) for _ in range(6)]
    return [row(f"{n}", prompts[n % 6], 16) for n in range(48)]


def mixed_lengths(chance: random.Random) -> list[Request]:
    """Answers from 4 to 128 tokens, as many below 23 as above it, in no order."""
    lengths = [round(math.exp(chance.uniform(math.log(4), math.log(128)))) for _ in range(48)]
    return [row(f"{n}", ids(chance, 12), length) for n, length in enumerate(lengths)]


def short_of_their_limit(chance: random.Random) -> list[Request]:
    """Rows that may make 1,000 tokens and make 12; memory holds two of 1,000."""
    return [row(f"{n}", ids(chance, 12), 1000, ends_after=12) for n in range(64)]


CASES = (
    Case("prefix_cache", "16 rows behind one template of 384 tokens", one_template, {}),
    Case(
        "prefix_order",
        "48 rows of eight templates of 128 tokens in turn, memory for three",
        templates_mixed,
        {"num_blocks": 32, "max_num_seqs": 6},
    ),
    Case("identical_rows", "48 rows, eight of each kind", many_alike, {"max_num_seqs": 16}),
    Case("long_rows_first", "48 answers of 4 to 128 tokens", mixed_lengths, {"max_num_seqs": 16}),
    Case(
        "learned_lengths",
        "64 answers of 12 tokens where 1,000 are allowed, memory for two of 1,000",
        short_of_their_limit,
        {"num_blocks": 128, "max_num_seqs": 32},
    ),
    Case("shared_prefix_attention", "16 rows behind one template of 384 tokens", one_template, {}),
)


def once(engine: Engine, rows: Sequence[Request]) -> dict[str, float]:
    """One run from an empty cache. Raises RuntimeError when a row fails."""
    engine.scheduler.pool.forget_all()
    before, started = engine.metrics(), time.perf_counter()
    for completion in engine.run(rows):
        if completion.finish_reason not in ("length", "stop"):
            raise RuntimeError(f"Row {completion.request_id}: {completion.error_message}")
    seconds, after = time.perf_counter() - started, engine.metrics()
    computed = after.prefilled_tokens + after.generated_tokens
    return {
        "steps": after.steps - before.steps,
        "computed_tokens": computed - before.prefilled_tokens - before.generated_tokens,
        "preemptions": after.preemptions - before.preemptions,
        "seconds": seconds,
    }


def compare(case: Case, model: Path, common: dict[str, Any], rounds: int) -> dict[str, Any]:
    from pagemill.engine import EngineConfig
    from pagemill.engine.engine import build_engine

    sides = {"with": True, "without": False}
    engines = {
        side: build_engine(EngineConfig(model=str(model), **{**common, **case.settings, case.switch: on}))
        for side, on in sides.items()
    }
    rows = case.make(random.Random(f"{SEED}-{case.switch}"))
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for turn in range(-1, rounds):  # the first warms up and does not count
        for side in sorted(sides, reverse=turn % 2 == 0):
            found = once(engines[side], rows)
            if turn >= 0:
                runs[side].append(found)
    medians = {
        side: {name: round(statistics.median(run[name] for run in done), 3) for name in done[0]}
        for side, done in runs.items()
    }
    ratios = {name: round(medians["without"][name] / medians["with"][name], 2) for name in FIGURES}
    return {"workload": case.shows, "rows": len(rows), **medians, "without_over_with": ratios}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure each of the engine's advantages, with and without.")
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2, a directory or a .gguf file")
    add("--dtype", default="auto")
    add("--threads", type=int, default=measure.cores())
    add("--rounds", type=int, default=3)
    add("--only", action="append", choices=[case.switch for case in CASES], help="this one; may be repeated")
    add("--json", type=Path, required=True)
    options = parser.parse_args(words)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    from pagemill.engine import EngineConfig
    from pagemill.worker.models import resolve_model

    model = resolve_model(options.model)
    common = {"dtype": options.dtype, "threads": options.threads, "kv_cache_gb": 0.25}
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    record: dict[str, Any] = {
        "command": measure.command_line(),
        "machine": measure.machine(),
        "rounds": options.rounds,
        "settings": common,
        "advantages": {},
    }
    for case in CASES:
        if case.switch in known and case.switch in (options.only or known):
            with measure.Watch() as watch:
                found = compare(case, model, common, options.rounds)
            record["advantages"][case.switch] = {**found, "other_cores": watch.other_cores}
            measure.save(options.json, record)
            said = ", ".join(f"{name} {value}x" for name, value in found["without_over_with"].items())
            print(f"{case.switch}: {said}", file=sys.stderr)


if __name__ == "__main__":
    main()
