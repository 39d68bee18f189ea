"""The least time that each workload can take on a machine, and how near a run came to it.

    python infra/bench/roofline.py --limits LIMITS --dtype bfloat16 [--runs out/bench/w1.json ...]
    python infra/bench/roofline.py --gflops 450 --gb-per-s 55

Two floors, of which the higher counts. Arithmetic: the model's products for each token that must be computed
(a prefix that rows share is computed once, the head runs only where a token comes out) and attention's, at
the best rate seen for any product. Memory: all weights once a decode step and the keys and values that
attention reads. Nothing else is charged, so that no engine can beat it and none will reach it: `ceiling` says
what the same machine gives when products come at the sizes that a step really has, and nothing beside.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import workloads
from shape import Shape

#: Rows that decode together; it decides how often weights are read, and seldom the limit.
BATCH = 64
#: Prefixes are shared by this many tokens.
BLOCK = 16
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Work:
    """What a workload takes, whoever does it, in tokens.

    distinct: prompt tokens left when shared prefixes count once. context_sum: over all tokens computed, the
    sum of how many lie before each; reads: the same over those that decode.
    """

    rows: int
    prompt: int
    distinct: int
    output: int
    context_sum: int
    reads: int

    @property
    def decoded(self) -> int:
        """Output tokens that go through the model again; a row's last one never does."""
        return self.output - self.rows


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine gives at best. products, attention: GFLOP/s; memory: GB/s.

    weight_bytes, kv_bytes: of one number. Attention is computed in floating point whatever the weights are.
    """

    products: float
    attention: float
    memory: float
    weight_bytes: int = 2
    kv_bytes: int = 2


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds that arithmetic and memory take at least."""

    arithmetic: float
    memory: float

    @property
    def seconds(self) -> float:
        return max(self.arithmetic, self.memory)


def work_of(items: Sequence[workloads.Item], share: bool = True) -> Work:
    """share: whether prefixes that rows have in common are computed once."""
    seen: set[tuple[int, ...]] = set()
    distinct = context_sum = reads = 0
    for item in items:
        length = len(item.prompt)
        cached = _shared_tokens(item.prompt, seen) if share else 0
        decoding = sum(range(length, length + item.max_tokens))
        distinct += length - cached
        context_sum += sum(range(cached, length)) + decoding
        reads += decoding
    return Work(
        rows=len(items),
        prompt=sum(len(item.prompt) for item in items),
        distinct=distinct,
        output=sum(item.max_tokens for item in items),
        context_sum=context_sum,
        reads=reads,
    )


def _shared_tokens(prompt: tuple[int, ...], seen: set[tuple[int, ...]]) -> int:
    """Leading tokens in whole blocks that an earlier row had too; the last token is always computed."""
    cached = 0
    for end in range(BLOCK, len(prompt), BLOCK):
        prefix = prompt[:end]
        if prefix in seen:
            cached = end
        seen.add(prefix)
    return cached


def floor(work: Work, shape: Shape, rates: Rates, batch: int) -> Floor:
    """batch: rows that decode together; it decides how often the weights are read."""
    products = 2 * shape.layer_weights * (work.distinct + work.decoded) + 2 * shape.head_weights * work.output
    attention = shape.attention_flops(work.context_sum)
    steps = work.decoded / batch
    weights = rates.weight_bytes * (shape.layer_weights + shape.head_weights) * steps
    kv = rates.kv_bytes * shape.kv_numbers * work.reads
    return Floor(
        arithmetic=(products / rates.products + attention / rates.attention) / 1e9,
        memory=(weights + kv) / rates.memory / 1e9,
    )


def rates_of(limits: Mapping[str, Any], kind: str, compute: str) -> Rates:
    """kind: what the weights are (int8 too); compute: the floating-point type beside them.

    Raises ValueError when the limits lack it, as on a CPU that cannot multiply it.
    """
    peak = limits["peak_gflops"]
    if missing := [name for name in (kind, compute) if name not in peak]:
        raise ValueError(f"The limits have no rate for {missing[0]}.")
    fastest = max(peak[kind], peak[compute])
    return Rates(fastest, peak[compute], limits["bandwidth_gb_per_s"], BYTES[kind], BYTES[compute])


def ceiling(work: Work, limits: Mapping[str, Any], kind: str, batch: int) -> float | None:
    """Output tokens/s if a step were its products alone, at `batch` rows and at the best way measured.

    Prompts come in steps as large as were measured, decoding in steps of `batch` rows. None where the limits
    have no such steps.
    """
    ways = [by for name, by in limits["step_ms"].items() if name.split()[0] == kind and "error" not in by]
    if not ways:
        return None
    best = {
        part: {int(rows): min(way[rows][part] for way in ways) for rows in ways[0]}
        for part in ("layers", "head")
    }
    milliseconds = (
        work.distinct * _each(best["layers"], max(best["layers"]))
        + work.decoded * _each(best["layers"], batch)
        + work.output * _each(best["head"], batch)
    )
    return work.output / (milliseconds / 1e3)


def _each(times: Mapping[int, float], rows: int) -> float:
    """Milliseconds a row when `rows` go together, between the sizes measured on a straight line."""
    sizes = sorted(times)
    rows = min(max(rows, sizes[0]), sizes[-1])
    above = next(size for size in sizes if size >= rows)
    below = max(size for size in sizes if size <= rows)
    along = (rows - below) / (above - below) if above > below else 0.0
    return (times[below] + along * (times[above] - times[below])) / rows


def against(record: Mapping[str, Any], work: Work, shape: Shape, limits: Mapping[str, Any]) -> dict[str, Any]:
    """How near a run came, for the numbers that it computed with. The limit is the same for every engine; the
    ceiling is at the batch of this one, and left out where an engine does not tell it."""
    settings = record["settings"]
    kind = settings.get("quantization") or settings["dtype"]
    limit = work.output / floor(work, shape, rates_of(limits, kind, settings["dtype"]), BATCH).seconds
    speed = record["output_tokens_per_second"]
    found = {"limit": round(limit, 1), "share_of_limit": round(speed / limit, 3)}
    if batch := settings.get("max_num_seqs"):
        step = ceiling(work, limits, kind, min(batch, work.rows))
        if step is not None:
            found |= {"step_ceiling": round(step, 1), "share_of_step_ceiling": round(speed / step, 3)}
    return found


def table(shape: Shape, rates: Rates, folder: Path, batch: int, rows: int | None) -> list[str]:
    lines = []
    for name in workloads.NAMES:
        items = workloads.read(folder, name, rows)
        shared, alone = work_of(items), work_of(items, share=False)
        least = floor(shared, shape, rates, batch)
        without = floor(alone, shape, rates, batch)
        lines.append(
            f"{name}: prompt {shared.prompt} ({shared.distinct} distinct), output {shared.output}; "
            f"arithmetic {least.arithmetic:.1f} s ({without.arithmetic:.1f} unshared), "
            f"memory {least.memory:.1f} s: at most {shared.output / least.seconds:.0f} output tokens/s"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="The least time that each workload can take.")
    add = parser.add_argument
    add("--workloads", type=Path, default=Path("out/bench/workloads"))
    add("--limits", type=Path, help="what limits.py wrote; its shape is used too")
    add("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    add("--quantization", choices=["int8"])
    add("--gflops", type=float, default=450.0, help="without --limits: the best rate of any product")
    add("--gb-per-s", type=float, default=55.0, help="without --limits: memory")
    add("--batch", type=int, default=BATCH, help="rows that decode together")
    add("--rows", type=int, help="only the first rows of each workload")
    add("--runs", type=Path, nargs="*", default=[], help="what engine.py wrote: how near they came")
    options = parser.parse_args()
    kind = options.quantization or options.dtype
    if options.runs and options.limits is None:
        parser.error("--runs wants --limits")
    if options.limits is None:
        shape, width = Shape(), BYTES[options.dtype]
        rates = Rates(options.gflops, options.gflops, options.gb_per_s, BYTES[kind], width)
    else:
        limits = json.loads(options.limits.read_text())
        shape = Shape(**limits["shape"])
        rates = rates_of(limits, kind, options.dtype)
    print(*table(shape, rates, options.workloads, options.batch, options.rows), sep="\n")
    for path in options.runs:
        record = json.loads(path.read_text())
        cut = record["rows"], record["max_tokens"]
        items = workloads.read(options.workloads, record["workload"], *cut)
        print(path.name, json.dumps(against(record, work_of(items), shape, limits)))


if __name__ == "__main__":
    main()
