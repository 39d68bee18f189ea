"""How much memory a model takes, and how much of it keys and values get.

Sizes and sentences only: it allocates nothing. When something does not fit, the error says what is needed,
what there is, and the largest budget and context that would fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagemill.engine.cache.storage import block_bytes
from pagemill.engine.config import (
    BLOCK_SIZE,
    DEFAULT_KV_GB,
    DEFAULT_NUM_SEQS,
    DEFAULT_NUM_TOKENS,
    EngineConfig,
)
from pagemill.engine.errors import OutOfMemory
from pagemill.engine.models.spec import DecoderSpec, ModelSpec

GIB = 1 << 30
# Copies of the logits while rows sample: as computed, as probabilities, and one on the way.
LOGITS = 3
# Without the sizes of layers: how many times the model's width a token takes on its way through one.
WIDTHS = 16


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """num_blocks: blocks of key-value memory. context: most tokens of a row, prompt and answer."""

    num_blocks: int
    context: int
    block_bytes: int

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // BLOCK_SIZE


def plan_memory(
    spec: ModelSpec,
    dtype: torch.dtype,
    config: EngineConfig,
    available: int | None = None,
    *,
    weights: int = 0,
    step: int | None = None,
    most_blocks: int | None = None,
) -> MemoryPlan:
    """Sizes the key-value memory; raises OutOfMemory when it cannot be had or is too small for the context.

    available: bytes free for weights, key-value memory and the numbers of one step; None where that cannot
    be known. weights: bytes of them still to be read. step: bytes of a step where they were measured.
    most_blocks: where no size was asked for, take all that is free, but no more than this; None takes
    DEFAULT_KV_GB. Without a context asked for, it is as much as model and memory allow.
    """
    one = bytes_of_block(spec, dtype, config)
    step = step_bytes(spec, dtype, config) if step is None else step
    free = None if available is None else max(0, (available - weights - step) // one)
    if config.num_blocks is not None:
        budget, blocks = f"num_blocks {config.num_blocks}", config.num_blocks
    elif config.kv_cache_gb is None and most_blocks is not None and free is not None:
        # At least one, so that where none is left the sentence is about that one.
        budget, blocks = "all that is left", max(1, min(free, most_blocks))
    else:
        gib = DEFAULT_KV_GB if config.kv_cache_gb is None else config.kv_cache_gb
        budget, blocks = f"kv_cache_gb {gib:g}", int(gib * GIB // one)
    would_fit = _would_fit(spec, free, one, available or 0) if free is not None else ""
    if blocks < 1:
        raise OutOfMemory(
            f"Key-value memory of {budget} holds no block of {BLOCK_SIZE} tokens: one needs {size_text(one)}"
            f"{would_fit or '; the largest context that fits is 0 tokens'}."
        )
    if free is not None and blocks > free:
        raise OutOfMemory(
            f"{_named(weights, 'weights', config, dtype)}{size_text(step)} for a step and "
            f"{size_text(blocks * one)} of key-value memory ({budget}) are "
            f"{size_text(weights + step + blocks * one)}{would_fit}."
        )
    if config.context is not None:
        _check_context(spec, config.context, blocks, one, budget)
    longest = _context_in(blocks, spec)
    return MemoryPlan(blocks, min(config.context or longest, longest), one)


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, config: EngineConfig) -> int:
    """Bytes of a loaded model's weights."""
    one = dtype.itemsize
    if isinstance(spec, DecoderSpec):
        # All but the embedding; norms and scales are too few to count.
        one = 1 if config.quantization is not None else one
        return spec.parameters() * one + spec.vocab_size * spec.hidden_size * (dtype.itemsize - one)
    return spec.parameters() * one


def memory_dtype(dtype: torch.dtype, config: EngineConfig) -> torch.dtype:
    """Of key-value memory."""
    return {None: dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[config.kv_cache_dtype]


def bytes_of_block(spec: ModelSpec, dtype: torch.dtype, config: EngineConfig) -> int:
    """Bytes of one block of key-value memory over all layers."""
    return block_bytes(spec.num_layers, spec.num_kv_heads, spec.head_dim, memory_dtype(dtype, config))


def step_bytes(spec: ModelSpec, dtype: torch.dtype, config: EngineConfig) -> int:
    """Bytes of the numbers between the layers in a full step, rather too many than too few."""
    tokens = config.max_num_tokens or DEFAULT_NUM_TOKENS
    rows = min(tokens, config.max_num_seqs or DEFAULT_NUM_SEQS)
    width = WIDTHS * spec.hidden_size
    if isinstance(spec, DecoderSpec):
        attention = 2 * spec.query_size + 2 * spec.kv_size
        width = 3 * spec.hidden_size + attention + 3 * spec.intermediate_size
    return tokens * width * dtype.itemsize + rows * spec.vocab_size * 4 * LOGITS


def size_text(count: int) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if abs(count) * 10 >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count / 1024:.1f} KiB"


def _named(weights: int, what: str, config: EngineConfig, dtype: torch.dtype) -> str:
    if not weights:
        return ""
    return f"{size_text(weights)} of {what} in {config.quantization or str(dtype).removeprefix('torch.')}, "


def _would_fit(spec: ModelSpec, blocks: int, one: int, available: int) -> str:
    if blocks == 0:
        return (
            f"; {size_text(available)} are free, which leaves no key-value memory: the largest context that "
            "fits is 0 tokens"
        )
    return (
        f"; {size_text(available)} are free, so that kv_cache_gb {budget_text(blocks, one)} fits, and the "
        f"largest context that fits is {_context_in(blocks, spec)} tokens"
    )


def budget_text(blocks: int, one: int) -> str:
    """A kv_cache_gb for nearly so many blocks of `one` bytes and never more: typed back in, it fits."""
    digits = 3
    while True:
        figures = str(blocks * one * 10**digits // GIB).rjust(digits + 1, "0")  # rounded down
        text = f"{figures[:-digits]}.{figures[-digits:]}"
        # A binary fraction of 30 places has as many decimal ones, so that this ends.
        if float(text) * GIB // one >= blocks - blocks // 100:
            return text.rstrip("0").rstrip(".")
        digits += 1


def _check_context(spec: ModelSpec, context: int, blocks: int, one: int, budget: str) -> None:
    if context > spec.context:
        raise OutOfMemory(f"A context of {context} tokens was asked for; the model's own is {spec.context}.")
    # The last token of a row needs no memory of its own: nothing is computed after it.
    needed = -(-(context - 1) // BLOCK_SIZE)
    if needed > blocks:
        raise OutOfMemory(
            f"A context of {context} tokens takes {size_text(needed * one)} of memory ({needed} blocks) and "
            f"{budget} gives {size_text(blocks * one)} ({blocks} blocks); the largest context that fits is "
            f"{_context_in(blocks, spec)} tokens."
        )


def _context_in(blocks: int, spec: ModelSpec) -> int:
    return min(spec.context, blocks * BLOCK_SIZE + 1) if blocks else 0
