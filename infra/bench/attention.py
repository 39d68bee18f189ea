"""Paired timing of attention on CPU: the compiled form against the form in torch, on the same memory.

    python infra/bench/attention.py [--threads 2] [--dtype float32] [--rounds 15] [--json FILE]

Each round times both sides in turn, the first of them alternating, on a layer that the round before did not
touch; a case reports the median of each side and the median of the rounds' ratios (torch / compiled). With
one thread the clock is that thread's own CPU time, which other programs on the machine disturb less.
Shapes are SmolLM2-135M's: 9 query heads over 3 kv heads of 64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pagemill.engine.cache.storage import KVStorage
from pagemill.kernels import attention_cpu, attention_torch
from pagemill.kernels.attention import plan_rows

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
SCALE = HEAD_DIM**-0.5
# (rows, new tokens of each, tokens of each)
CASES = [
    (64, 1, 100),
    (64, 1, 200),
    (64, 1, 400),
    (64, 1, 1000),
    (1, 512, 512),
    (1, 1024, 1024),
    (1, 3000, 3000),
]
# More than any cache, over all layers together.
STORAGE_BYTES = 256 << 20

Attend = Callable[[Tensor, Tensor], Tensor]


def sides(rows: int, new: int, length: int, storage: KVStorage) -> dict[str, Attend]:
    blocks = -(-length // 16)
    tables = torch.randperm(rows * blocks).view(rows, blocks).tolist()
    packed = plan_rows([new] * rows, [length] * rows, tables, storage.layer(0))
    return {
        "compiled": lambda query, layer: attention_cpu.paged_attention(query, layer, packed, SCALE),
        "torch": lambda query, layer: attention_torch.paged_attention(query, layer, packed, SCALE),
    }


def measure(
    rows: int, new: int, length: int, dtype: torch.dtype, rounds: int, clock: Callable[[], float]
) -> dict[str, object]:
    blocks = rows * -(-length // 16)
    layer_bytes = blocks * 2 * KV_HEADS * HEAD_DIM * 16 * dtype.itemsize
    layers = min(30, max(4, STORAGE_BYTES // layer_bytes))
    storage = KVStorage(blocks, layers, KV_HEADS, HEAD_DIM, dtype, torch.device("cpu"))
    storage.tensor.normal_()
    query = torch.randn(rows * new, HEADS, HEAD_DIM).to(dtype)
    both = sides(rows, new, length, storage)
    answers = [attend(query, storage.layer(0)).float() for attend in both.values()]
    times: dict[str, list[float]] = {name: [] for name in both}
    for i in range(rounds):
        order = list(both) if i % 2 else list(reversed(both))
        for name in order:
            layer = storage.layer((i * 2 + order.index(name)) % layers)
            began = clock()
            both[name](query, layer)
            times[name].append((clock() - began) * 1e3)
    return {
        "rows": rows,
        "new": new,
        "tokens": length,
        "compiled_ms": round(statistics.median(times["compiled"]), 3),
        "torch_ms": round(statistics.median(times["torch"]), 3),
        "ratio": round(statistics.median(t / c for c, t in zip(*times.values(), strict=True)), 2),
        "compiled_least_ms": round(min(times["compiled"]), 3),
        "torch_least_ms": round(min(times["torch"]), 3),
        "largest_difference": float((answers[0] - answers[1]).abs().max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    results = []
    for rows, new, length in CASES:
        results.append(measure(rows, new, length, getattr(torch, options.dtype), options.rounds, clock))
        print(results[-1], flush=True)
    if options.json:
        document = {
            "command": " ".join(["python", *sys.argv]),
            "threads": options.threads,
            "dtype": options.dtype,
            "torch": torch.__version__,
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "cases": results,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
