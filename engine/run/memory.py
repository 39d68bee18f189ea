"""How much memory there is, and how much of it keys and values get.

Sizes and sentences only: it allocates nothing. When something does not fit, the error says what is needed,
what there is, and the largest context that would fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pagemill.engine.cache.storage import block_bytes
from pagemill.engine.config import BLOCK_SIZE, EngineConfig
from pagemill.engine.errors import OutOfMemory
from pagemill.engine.models.spec import DecoderSpec, ModelSpec

GIB = 1 << 30


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


def plan_memory(
    spec: ModelSpec,
    dtype: torch.dtype,
    config: EngineConfig,
    available: int | None = None,
) -> MemoryPlan:
    """Sizes the key-value memory; raises OutOfMemory when it cannot be had or is too small for the context.

    available: bytes free for it, None where that cannot be known. Without a context asked for, it is as
    much as model and memory allow.
    """
    num_blocks, context = config.num_blocks, config.context
    one = block_bytes(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)
    budget = f"num_blocks {num_blocks}" if num_blocks is not None else f"kv_cache_gb {config.kv_cache_gb:g}"
    blocks = num_blocks if num_blocks is not None else int(config.kv_cache_gb * GIB // one)
    if blocks < 1:
        raise OutOfMemory(
            f"Key-value memory of {budget} holds no block of {BLOCK_SIZE} tokens: one needs {_size(one)}; "
            f"the largest context that fits is 0 tokens."
        )
    if available is not None and blocks * one > available:
        raise OutOfMemory(
            f"Key-value memory of {budget} needs {_size(blocks * one)} and {_size(available)} are free; the "
            f"largest context that fits is {_context_in(max(0, available) // one, spec)} tokens."
        )
    if context is not None:
        _check_context(spec, context, blocks, one, budget)
    longest = _context_in(blocks, spec)
    return MemoryPlan(blocks, min(context or longest, longest), one)


def _check_context(spec: ModelSpec, context: int, blocks: int, one: int, budget: str) -> None:
    if context > spec.context:
        raise OutOfMemory(f"A context of {context} tokens was asked for; the model's own is {spec.context}.")
    # The last token of a row needs no memory of its own: nothing is computed after it.
    needed = -(-(context - 1) // BLOCK_SIZE)
    if needed > blocks:
        raise OutOfMemory(
            f"A context of {context} tokens takes {_size(needed * one)} of memory ({needed} blocks) and "
            f"{budget} gives {_size(blocks * one)} ({blocks} blocks); the largest context that fits is "
            f"{_context_in(blocks, spec)} tokens."
        )


def _context_in(blocks: int, spec: ModelSpec) -> int:
    return min(spec.context, blocks * BLOCK_SIZE + 1) if blocks else 0


def check_weights_fit(
    spec: ModelSpec, dtype: torch.dtype, available: int | None, quantization: str | None = None
) -> None:
    """Raises OutOfMemory before a model is read that could never fit."""
    needed = spec.parameters() * dtype.itemsize
    if quantization == "int8" and isinstance(spec, DecoderSpec):
        # All but the embedding is bytes; norms and scales are too few to count.
        needed = spec.parameters() + spec.vocab_size * spec.hidden_size * (dtype.itemsize - 1)
    if available is not None and needed > available:
        name = quantization or str(dtype).removeprefix("torch.")
        raise OutOfMemory(f"The weights need {_size(needed)} in {name} and {_size(available)} are free.")


def _size(count: int) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if abs(count) * 10 >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count / 1024:.1f} KiB"


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take: the machine's, or less where a control group says so.

    None where neither can be read (not Linux). `root` is where proc and sys are looked for.
    """
    bounds = [_machine_available(root / "proc/meminfo"), _group_available(root / "sys/fs/cgroup")]
    known = [bound for bound in bounds if bound is not None]
    return min(known) if known else None


def _machine_available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else None


def _group_available(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    # Pages of files that nobody used lately are given back when memory is short.
    return int(limit) - used + int(stat.get("inactive_file", 0))
