"""The least time that rows can take on this card, from the ceilings measured in the same run.

Kernels run one after another, so their least times add up. A step's dense layers take the longer of reading
their weights and of multiplying; attention the longer of reading keys and values and of its own products.
All rows decode together from the first step on, and a step has as many as have tokens left: nothing is
charged for scheduling, norms, sampling or writing, and memory is without end. So no engine can beat it, and
none will reach it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.engine.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes and operations a second."""

    bandwidth: float
    peak: float


@dataclass(frozen=True, slots=True)
class Load:
    """What a model asks of a card. weights: numbers in dense layers; head: those of its last one, which only
    tokens that sample go through. kv: numbers kept a token. attention: operations a token and key."""

    weights: int
    head: int
    kv: int
    attention: int
    bytes_each: int = 2


def load_of(spec: DecoderSpec, bytes_each: int = 2) -> Load:
    attention = spec.hidden_size * (2 * spec.query_size + 2 * spec.kv_size)
    layer = attention + 3 * spec.hidden_size * spec.intermediate_size
    return Load(
        spec.num_layers * layer,
        spec.vocab_size * spec.hidden_size,
        spec.num_layers * 2 * spec.kv_size,
        4 * spec.num_layers * spec.query_size,
        bytes_each,
    )


def least_seconds(load: Load, rates: Rates, rows: Sequence[tuple[int, int]], shared: int = 0) -> float:
    """rows: tokens of each prompt, and of its answer; the first `shared` of every prompt are the same, and
    are computed, and read in each step, once."""
    return prefill_seconds(load, rates, rows, shared) + decode_seconds(load, rates, rows, shared)


def prefill_seconds(load: Load, rates: Rates, rows: Sequence[tuple[int, int]], shared: int = 0) -> float:
    """Products alone: there are so many tokens that reading weights hides behind them."""
    tokens = sum(prompt - shared for prompt, _ in rows) + shared
    seen = sum((prompt * (prompt + 1) - shared * (shared + 1)) / 2 for prompt, _ in rows)
    seen += shared * (shared + 1) / 2
    operations = 2 * load.weights * tokens + 2 * load.head * len(rows) + load.attention * seen
    return operations / rates.peak


def decode_seconds(load: Load, rates: Rates, rows: Sequence[tuple[int, int]], shared: int = 0) -> float:
    """The first token of an answer comes of the prompt, and the last one never goes through the model."""
    longest = max(answer for _, answer in rows)
    alive, contexts = [0] * (longest + 1), [0] * (longest + 1)
    for prompt, answer in rows:
        # Decode step i of a row computes its answer's token i, and reads all keys up to it.
        for step in range(1, answer):
            alive[step] += 1
            contexts[step] += prompt + step
    total = 0.0
    for count, context in zip(alive[1:longest], contexts[1:longest], strict=True):
        numbers = load.weights + load.head
        dense = max(numbers * load.bytes_each / rates.bandwidth, 2 * numbers * count / rates.peak)
        read = context - shared * (count - 1)
        attention = max(
            read * load.kv * load.bytes_each / rates.bandwidth, load.attention * context / rates.peak
        )
        total += dense + attention
    return total
