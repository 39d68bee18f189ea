"""Paired timing of attention on CPU: the compiled form against the form in torch, on the same memory.

    python infra/bench/attention.py [--shared] [--threads 2] [--dtype float32] [--rounds 15] [--json FILE]

With --shared: rows behind one prefix, which the compiled form reads once for all, against the same rows where
each reads it for itself.

Each round times both sides in turn, the first of them alternating, on a layer that the round before did not
touch; a case reports the median of each side and the median of the rounds' ratios (torch / compiled, or apart
/ together). With one thread the clock is that thread's own CPU time, which other programs on the machine
disturb less. Shapes are SmolLM2-135M's, 9 query heads over 3 kv heads of 64, where a case names no other.
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
SMOLLM2, UNGROUPED, WIDE = (9, 3, 64), (8, 8, 64), (16, 8, 128)
# (rows, tokens in common, tokens of each row's own, (query heads, kv heads, head_dim))
SHARED_CASES = [
    (64, 1008, 50, SMOLLM2),
    (64, 1008, 100, SMOLLM2),
    (128, 1008, 50, SMOLLM2),
    (64, 512, 50, SMOLLM2),
    (128, 512, 100, SMOLLM2),
    (64, 128, 200, SMOLLM2),
    (64, 1008, 50, UNGROUPED),
    (64, 1008, 50, WIDE),
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


def timed(
    both: dict[str, Attend], query: Tensor, storage: KVStorage, rounds: int, clock: Callable[[], float]
) -> dict[str, object]:
    """Milliseconds of each side, in turn; the ratio is the second side's time by the first's."""
    layers = storage.tensor.shape[1]
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
        **{f"{name}_ms": round(statistics.median(ms), 3) for name, ms in times.items()},
        "ratio": round(statistics.median(t / c for c, t in zip(*times.values(), strict=True)), 2),
        **{f"{name}_least_ms": round(min(ms), 3) for name, ms in times.items()},
        "largest_difference": float((answers[0] - answers[1]).abs().max()),
    }


def storage_of(blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVStorage:
    layer_bytes = blocks * 2 * kv_heads * head_dim * 16 * dtype.itemsize
    layers = min(30, max(4, STORAGE_BYTES // layer_bytes))
    storage = KVStorage(blocks, layers, kv_heads, head_dim, dtype, torch.device("cpu"))
    storage.tensor.normal_()
    return storage


def measure(
    rows: int, new: int, length: int, dtype: torch.dtype, rounds: int, clock: Callable[[], float]
) -> dict[str, object]:
    storage = storage_of(rows * -(-length // 16), KV_HEADS, HEAD_DIM, dtype)
    query = torch.randn(rows * new, HEADS, HEAD_DIM).to(dtype)
    both = sides(rows, new, length, storage)
    return {"rows": rows, "new": new, "tokens": length, **timed(both, query, storage, rounds, clock)}


def measure_shared(
    rows: int,
    prefix: int,
    own: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    rounds: int,
    clock: Callable[[], float],
) -> dict[str, object]:
    """Rows that decode a token each behind one prefix: read together, or by each row for itself."""
    heads, kv_heads, head_dim = shape
    shared, more = prefix // 16, -(-own // 16)
    places = torch.randperm(shared + rows * more).tolist()
    storage = storage_of(len(places), kv_heads, head_dim, dtype)
    starts = range(shared, len(places), more)
    tables = [places[:shared] + places[start : start + more] for start in starts]
    lengths = [prefix + own] * rows

    def side(share: bool) -> Attend:
        packed = plan_rows([1] * rows, lengths, tables, storage.layer(0), share)
        return lambda query, layer: attention_cpu.paged_attention(query, layer, packed, head_dim**-0.5)

    both = {"together": side(True), "apart": side(False)}
    query = torch.randn(rows, heads, head_dim).to(dtype)
    about = {"rows": rows, "prefix": prefix, "own": own, "heads": heads, "kv_heads": kv_heads}
    return {**about, "head_dim": head_dim, **timed(both, query, storage, rounds, clock)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", action="store_true", help="rows behind one prefix, together and apart")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    results = []
    how = getattr(torch, options.dtype), options.rounds, clock
    if options.shared:
        cases = (measure_shared(*case, *how) for case in SHARED_CASES)
    else:
        cases = (measure(*case, *how) for case in CASES)
    for case in cases:
        results.append(case)
        print(case, flush=True)
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
