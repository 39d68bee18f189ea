"""What this machine can do at best: memory bandwidth, and matrix products at the model's shapes.

    python infra/bench/limits.py --model smollm2 --json out/bench/limits.json

Best of many repetitions, since a limit is wanted and not a mean. Products are measured plain (`F.linear`,
which lays the weight out anew at each call) and prepacked (oneDNN's layout, made once); in int8 prepacked,
with activations that are int8 already, and dynamic, where the call quantises them. `step` is one pass through
all of the model's products, each layer with weights of its own, so that they stream from memory as in a real
step: no engine that computes with these products can be faster. Nothing here knows the engine; it reads the
model's shape from its file.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure
from shape import Shape, shape_of

if TYPE_CHECKING:
    from torch import Tensor

    #: Takes activations [rows, in].
    Product = Callable[[Tensor], Tensor]

MEBIBYTES = (4, 16, 64, 256, 1024)
ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
WAYS = {
    "float32": ("plain", "prepacked"),
    "bfloat16": ("plain", "prepacked"),
    "int8": ("dynamic", "prepacked"),
}


def best(run: Callable[[], object], seconds: float, least: int = 4) -> float:
    """The shortest time of one call, over `seconds` and at least so many calls; one call more goes before."""
    run()
    shortest, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while calls < least or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        shortest = min(shortest, time.perf_counter() - began)
        calls += 1
    return shortest


def bandwidth(mebibytes: Sequence[int], seconds: float) -> dict[str, dict[str, float]]:
    """GB/s by size: copying (read and written), summing (read), adding two into a third."""
    import torch

    found = {}
    for size in mebibytes:
        count = size * (1 << 20) // 4
        a, b, c = torch.ones(count), torch.ones(count), torch.ones(count)
        moved = 4 * count / 1e9
        found[f"{size}MiB"] = {
            "copy": round(2 * moved / best(partial(b.copy_, a), seconds), 1),
            "read": round(moved / best(a.sum, seconds), 1),
            "add": round(3 * moved / best(partial(torch.add, a, b, out=c), seconds), 1),
        }
    return found


def products(weight: Tensor, kind: str, way: str) -> Product:
    """A product with this weight [out, in]; raises RuntimeError where CPU or torch have no such way."""
    import torch
    import torch.nn.functional as F

    if kind == "int8":
        return _dynamic(weight) if way == "dynamic" else _prepacked_int8(weight)
    if way == "plain":
        return lambda x: F.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _prepacked_int8(weight: Tensor) -> Product:
    import torch

    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    scales, zeros = torch.ones(len(weight)), torch.zeros(len(weight), dtype=torch.int64)
    rest: Any = (packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return lambda x: torch.ops.onednn.qlinear_pointwise(x, 1.0, 128, *rest)


def _dynamic(weight: Tensor) -> Product:
    import torch

    scales, zeros = torch.ones(len(weight)).double(), torch.zeros(len(weight), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that these will move to another package
        quantized = torch.quantize_per_channel(weight.float(), scales, zeros, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantized, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, reduce_range=False)


def ways(kinds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(kind of number, way) of all that is measured."""
    for kind in kinds:
        yield from ((kind, way) for way in WAYS[kind])


def weights(outer: int, inner: int, kind: str) -> Tensor:
    import torch

    if kind == "int8":
        return torch.randint(-127, 128, (outer, inner), dtype=torch.int8)
    return torch.randn(outer, inner).to(getattr(torch, kind))


def activations(rows: int, inner: int, kind: str, way: str) -> Tensor:
    import torch

    if (kind, way) == ("int8", "prepacked"):
        return torch.randint(0, 256, (rows, inner), dtype=torch.uint8)
    return torch.randn(rows, inner).to(torch.float32 if kind == "int8" else getattr(torch, kind))


def gemm(shape: Shape, kinds: Sequence[str], rows: Sequence[int], seconds: float) -> dict[str, Any]:
    """GFLOP/s of each of the model's products, by kind, way and rows; a way that fails has its reason."""
    found: dict[str, Any] = {}
    for name, (inner, outer) in shape.products().items():
        for kind, way in ways(kinds):
            rates: dict[str, Any] = {}
            try:
                product = products(weights(outer, inner, kind), kind, way)
                for count in rows:
                    taken = _pass([(product, inner)], count, (kind, way), seconds)
                    rates[str(count)] = round(2 * count * inner * outer / taken / 1e9, 1)
            except RuntimeError as error:
                rates["error"] = _first_line(error)
            found[f"{name} {kind} {way}"] = rates
    return found


def step(shape: Shape, kinds: Sequence[str], rows: Sequence[int], seconds: float) -> dict[str, Any]:
    """Milliseconds of all products of one step: `layers` and `head` apart, by kind, way and rows."""
    found: dict[str, Any] = {}
    for kind, way in ways(kinds):
        try:
            layers = [
                (products(weights(outer, inner, kind), kind, way), inner)
                for _ in range(shape.layers)
                for inner, outer in shape.layer_products().values()
            ]
            head = [(products(weights(shape.vocabulary, shape.hidden, kind), kind, way), shape.hidden)]
            found[f"{kind} {way}"] = {
                str(count): {
                    part: round(_pass(chain, count, (kind, way), seconds) * 1e3, 4)
                    for part, chain in (("layers", layers), ("head", head))
                }
                for count in rows
            }
        except RuntimeError as error:
            found[f"{kind} {way}"] = {"error": _first_line(error)}
    return found


def _pass(chain: Sequence[tuple[Product, int]], rows: int, how: tuple[str, str], seconds: float) -> float:
    """Seconds of all products of a chain, one after the other."""
    inputs = {inner: activations(rows, inner, *how) for _, inner in chain}

    def run() -> None:
        for product, inner in chain:
            product(inputs[inner])

    return best(run, seconds)


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0][:120]


def peaks(rates: dict[str, Any]) -> dict[str, float]:
    """The best GFLOP/s of each kind of number, over all shapes, ways and rows."""
    found: dict[str, float] = {}
    for name, by_rows in rates.items():
        kind = name.split()[1]
        for rate in by_rows.values():
            if isinstance(rate, float):
                found[kind] = max(found.get(kind, 0.0), rate)
    return found


def measure_all(
    shape: Shape,
    kinds: Sequence[str],
    rows: Sequence[int],
    seconds: float,
    mebibytes: Sequence[int] = MEBIBYTES,
) -> dict[str, Any]:
    """All of it, with what other processes took meanwhile. No cache holds the two largest of `mebibytes`."""
    import torch

    with measure.Watch() as watch, torch.inference_mode():
        moved = bandwidth(mebibytes, seconds)
        rates = gemm(shape, kinds, rows, seconds)
        passes = step(shape, kinds, rows, seconds)
    from_memory = [max(moved[f"{size}MiB"].values()) for size in sorted(mebibytes)[-2:]]
    return {
        "peak_gflops": peaks(rates),
        "bandwidth_gb_per_s": max(from_memory),
        "bandwidth": moved,
        "gemm_gflops": rates,
        "step_ms": passes,
        "other_cores": watch.other_cores,
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what this machine can do at best.")
    parser.add_argument("--model", default="smollm2", help="smollm2, a directory or a .gguf file")
    parser.add_argument("--threads", type=int, default=measure.cores())
    parser.add_argument("--kinds", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="rows at once to measure")
    parser.add_argument("--seconds", type=float, default=0.25, help="for each of some 350 measurements")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch

    from pagemill.worker.models import resolve_model

    torch.set_num_threads(options.threads)
    shape = shape_of(resolve_model(options.model))
    record = measure_all(shape, options.kinds, options.rows, options.seconds)
    record |= {
        "threads": options.threads,
        "shape": shape.record(),
        "machine": measure.machine(),
        "command": measure.command_line(),
    }
    measure.save(options.json, record)
    print(f"peak GFLOP/s {record['peak_gflops']}, memory {record['bandwidth_gb_per_s']} GB/s", end="")
    print(f"; others took {record['other_cores']} cores" if record["other_cores"] else "")


if __name__ == "__main__":
    main()
