"""What an engine is told when it is built, and what it says about itself afterwards.

Knows numbers and names only. It may not load anything, nor look at the machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pagemill.engine.errors import EngineError

# Cached memory is taken and hashed by this many tokens on every device: a larger unit would share less of
# a prompt (64 would lose 48 of 1,008 common tokens), a smaller one would cost more table entries.
BLOCK_SIZE = 16

# Without a word from the caller: steps that a CPU finishes in a fraction of a second. What a card takes is
# engine/run/card_memory.py's.
DEFAULT_NUM_TOKENS = 512
DEFAULT_NUM_SEQS = 128
# Of key-value memory on CPU, in GiB; on a card it is all that is left.
DEFAULT_KV_GB = 1.0
MOST_KV_CACHE_GB = 1 << 20  # a pebibyte: more is a slip, and beyond 1e299 no number of bytes

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
FLOAT16_ON_CPU = "dtype float16 is not computed on CPU; use float32 or bfloat16."


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to build an engine. None means "decide by device and model".

    model: a directory with safetensors and tokenizer files, or a GGUF file.
    dtype: auto, float32, bfloat16, or on a card float16; auto is bfloat16 where the hardware computes in it.
    device: auto, cpu, cuda, or cuda:N for card N; auto is the first card that will do, or else the CPU.
    quantization: int8 computes dense layers in 8-bit integers (weights by output channel, activations by
        token) and everything else in `dtype`; fp8 does so in 8-bit floats (e4m3), on a card of compute
        capability 8.9 or more; None computes all in `dtype`.
    kv_cache_dtype: int8 or fp8 keeps keys and values in 8 bits, with a scale for each token and head: nearly
        twice the tokens in the same memory, half of it to read, and other tokens now and then. On a card
        alone, fp8 from 8.9 on. None keeps them in `dtype`.
    kv_cache_gb: key-value memory in GiB; None is 1 on CPU, and on a card what weights and the largest step
        leave of it. `num_blocks` (of 16 tokens) overrides it.
    max_num_tokens: token budget of a step, prefill chunks and decodes together.
    max_num_seqs: most rows running at once.
    prefix_cache: share the memory of common prefixes between rows.
    deterministic: a row's logits have the same bits whatever its neighbours, batch, chunks and threads, in
        any dtype. On CPU what is compiled keeps that promise anyway, at no cost; bfloat16 on a CPU with AMX
        then gives up a library's products. On a card dense layers and attention take other forms then
        (engine/README.md has what that costs).
    prefix_order: run rows with a common prefix one after another; without it, and without a prefix cache,
        they come in order of arrival.
    long_rows_first: of rows that wait, begin with those that are expected to take longest.
    learned_lengths: expect a row to produce what others of its group did; without it, its `max_tokens`.
    identical_rows: run requests that must get the same tokens once.
    shared_prefix_attention: read that memory once for all rows of a step that share it; no token changes.
    context: most tokens of prompt and answer together; never above the model's own.
    threads: CPU threads for arithmetic.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    kv_cache_gb: float | None = None
    num_blocks: int | None = None
    max_num_tokens: int | None = None
    max_num_seqs: int | None = None
    prefix_cache: bool = True
    deterministic: bool = False
    prefix_order: bool = True
    long_rows_first: bool = True
    learned_lengths: bool = True
    identical_rows: bool = True
    shared_prefix_attention: bool = True
    context: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_num_tokens", "max_num_seqs", "context", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EngineError(f"{name} must be at least 1, not {value}.")
        # How little is too little depends on the model, so that the sentence about it is memory.py's.
        if self.kv_cache_gb is not None and not abs(self.kv_cache_gb) <= MOST_KV_CACHE_GB:  # nor is NaN
            raise EngineError(
                f"kv_cache_gb must be a number up to {MOST_KV_CACHE_GB}, not {self.kv_cache_gb}."
            )
        if self.dtype not in DTYPES:
            raise EngineError(f"dtype must be auto, float32, bfloat16 or float16, not {self.dtype!r}.")
        if not DEVICES.fullmatch(self.device):
            raise EngineError(f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}.")
        if self.dtype == "float16" and self.device == "cpu":
            raise EngineError(FLOAT16_ON_CPU)
        for name in ("quantization", "kv_cache_dtype"):
            if getattr(self, name) not in (None, "int8", "fp8"):
                raise EngineError(f"{name} must be int8, fp8 or left out, not {getattr(self, name)!r}.")
        if self.deterministic and self.quantization == "fp8":
            raise EngineError("deterministic holds for int8 dense layers and not for fp8: give one up.")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one scheduler, all of them resolved, and its switches, which are EngineConfig's.

    num_blocks: blocks of key-value memory. rope_switch: a row of more tokens than this has other keys than
    before, all of them (longrope); None for never. max_tokens_per_row: most tokens one row may reach,
    prompt and answer; the smaller of the context and of what the whole memory holds.
    """

    num_blocks: int
    context: int
    max_num_tokens: int = 512
    max_num_seqs: int = 64
    prefix_cache: bool = True
    prefix_order: bool = True
    long_rows_first: bool = True
    learned_lengths: bool = True
    identical_rows: bool = True
    rope_switch: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_blocks", "context", "max_num_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name} must be at least 1, not {getattr(self, name)}.")

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE

    @property
    def max_tokens_per_row(self) -> int:
        """The last token of a row needs no memory of its own, as nothing is computed after it."""
        return min(self.context, self.kv_tokens + 1)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded engine says about itself.

    fingerprint: digest of what decides the tokens (weights, config, tokenizer, dtype, quantization).
    quantization, kv_cache_dtype: as in EngineConfig.
    context: most tokens of a row, prompt and answer. kv_tokens: tokens of key-value memory in all.
    rope_switch: see SchedulerConfig.
    generation_defaults: the model's generation_config (temperature, top_p, top_k, ...), for whoever
        resolves a request's parameters; the engine itself reads nothing from it.
    """

    name: str
    fingerprint: str
    architecture: str
    dtype: str
    device: str
    context: int
    vocab_size: int
    num_blocks: int
    kv_tokens: int
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    eos_token_ids: frozenset[int] = frozenset()
    rope_switch: int | None = None
    generation_defaults: Mapping[str, object] = field(default_factory=dict)
