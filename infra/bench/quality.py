"""What other numbers cost in quality: perplexity and greedy tokens on real English text, against float32.

    python infra/bench/quality.py MODEL [--tokens 16384] [--window 512] [--json FILE] [--numbers NUMBERS ...]

The text is Python's own help (pydoc_data.topics), which every installation of CPython holds. It is cut into
windows that lie evenly over it; each is read from its beginning, and every token but a window's first counts.
NUMBERS are float32, bfloat16, int8 (the rest in float32) or int8+bfloat16; float32 is always first.

perplexity: exp of the mean negative log-likelihood. change: its ratio to float32's less 1, with the standard
error of the paired difference by window. agreement: the share of places where the most likely token is the
same as float32's. median_margin: how far apart, in logits, float32 saw the two tokens where they differ.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.config import BLOCK_SIZE
from pagemill.engine.models.decoder import Decoder, Inputs
from pagemill.engine.tokenizer import Tokenizer
from pagemill.engine.weights.load import load_decoder, open_checkpoint
from pagemill.kernels.attention import plan_rows

NUMBERS = ("float32", "bfloat16", "int8", "int8+bfloat16")


@dataclass(frozen=True)
class Reading:
    """Of all places that count: negative log-likelihoods [windows, places] and the most likely tokens."""

    losses: Tensor
    tokens: Tensor
    seconds: float


def windows_of(model: str, total: int, width: int) -> Tensor:
    """Token ids [windows, width]."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = Tokenizer.from_path(model).encode_prompt(text)
    count = max(1, total // width)
    if count * width > len(ids):
        sys.exit(f"the text has {len(ids)} tokens only")
    step = len(ids) // count
    return torch.tensor([ids[i * step : i * step + width] for i in range(count)])


def open_decoder(model: str, numbers: str) -> Decoder:
    kind, _, dtype = numbers.rpartition("+")
    if numbers == "int8":
        kind, dtype = "int8", "float32"
    return load_decoder(open_checkpoint(model), getattr(torch, dtype), torch.device("cpu"), kind or None)


def logits_of(decoder: Decoder, windows: Tensor) -> Iterator[Tensor]:
    """Logits [width - 1, vocabulary] of each window."""
    spec, width = decoder.spec, windows.shape[1]
    blocks = -(-width // BLOCK_SIZE)
    dtype = decoder.embedding.dtype
    storage = KVStorage(blocks, spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, torch.device("cpu"))
    positions = torch.arange(width)
    for ids in windows:
        rows = plan_rows([width], [width], [range(blocks)], storage.layer(0))
        inputs = Inputs(
            ids, positions, positions // BLOCK_SIZE, positions % BLOCK_SIZE, torch.arange(blocks), rows
        )
        yield decoder.logits(decoder.hidden(inputs, storage)[:-1])


@torch.inference_mode()
def read(model: str, numbers: str, windows: Tensor) -> Reading:
    decoder = open_decoder(model, numbers)
    started = time.perf_counter()
    losses, tokens = [], []
    for ids, logits in zip(windows, logits_of(decoder, windows), strict=True):
        losses.append(F.cross_entropy(logits, ids[1:], reduction="none"))
        tokens.append(logits.argmax(-1))
    return Reading(torch.stack(losses), torch.stack(tokens), time.perf_counter() - started)


@torch.inference_mode()
def margins(model: str, windows: Tensor, reference: Reading, others: dict[str, Reading]) -> dict[str, float]:
    """The median distance, in float32's logits, between its own token and another's where they differ."""
    found: dict[str, list[Tensor]] = {name: [] for name in others}
    for i, logits in enumerate(logits_of(open_decoder(model, "float32"), windows)):
        best = logits.gather(1, reference.tokens[i, :, None])
        for name, other in others.items():
            apart = (best - logits.gather(1, other.tokens[i, :, None])).squeeze(1)
            found[name].append(apart[other.tokens[i] != reference.tokens[i]])
    return {
        name: float(torch.cat(parts).median()) if torch.cat(parts).numel() else 0.0
        for name, parts in found.items()
    }


def report(reading: Reading, reference: Reading) -> dict[str, float]:
    change = (reading.losses - reference.losses).mean(1).tolist()
    error = statistics.stdev(change) / math.sqrt(len(change)) if len(change) > 1 else 0.0
    return {
        "perplexity": round(float(reading.losses.mean().exp()), 4),
        "change_percent": round(100 * math.expm1(statistics.fmean(change)), 3),
        "standard_error_percent": round(100 * error, 3),
        "agreement_percent": round(100 * float((reading.tokens == reference.tokens).float().mean()), 2),
        "seconds": round(reading.seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--numbers", nargs="+", default=["bfloat16", "int8"], choices=NUMBERS)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    windows = windows_of(args.model, args.tokens, args.window)
    reference = read(args.model, "float32", windows)
    others = {n: read(args.model, n, windows) for n in args.numbers if n != "float32"}
    results = {name: report(one, reference) for name, one in {"float32": reference, **others}.items()}
    for name, margin in margins(args.model, windows, reference, others).items():
        results[name]["median_margin"] = round(margin, 3)
    for name, result in results.items():
        print(name.ljust(14), "  ".join(f"{key} {value}" for key, value in result.items()))
    if args.json:
        facts = {
            "command": "python " + " ".join(sys.argv),
            "model": Path(args.model).name,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "windows": list(windows.shape),
            "results": results,
        }
        args.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
