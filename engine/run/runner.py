"""Runs batches: packed inputs, one pass of the decoder, tokens for the rows that sample.

The only thing that holds weights and key-value memory. It may not know why a batch is what it is, nor
change a sequence.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.engine.batch import Batch, StepResult
from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.decoder import Decoder
from pagemill.engine.request import TokenLogprob
from pagemill.engine.run.memory import MemoryPlan, available_memory, check_weights_fit, plan_memory
from pagemill.engine.run.rows import StepRows, build_rows
from pagemill.engine.run.sampler import Sampled, Sampler
from pagemill.engine.weights.load import Checkpoint, load_decoder


class ModelRunner:
    """Implements batch.Runner for one decoder and one storage."""

    def __init__(self, decoder: Decoder, storage: KVStorage, sampler: Sampler) -> None:
        self.decoder = decoder
        self.storage = storage
        self.sampler = sampler

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        started = time.perf_counter()
        rows = build_rows(batch, self.storage.layer_block_bytes, self.storage.tensor.device)
        prepared = time.perf_counter()
        hidden = self.decoder.hidden(rows.inputs, self.storage)
        broken = _broken_rows(hidden, rows)
        logits = self.decoder.logits(hidden[rows.last_tokens]) if rows.sampling else None
        computed = time.perf_counter()
        sampled = self._sample(logits, batch, rows)
        return _result(batch, rows, broken, sampled, prepared - started, time.perf_counter() - computed)

    def _sample(self, logits: Tensor | None, batch: Batch, rows: StepRows) -> Sampled:
        if logits is None:
            return Sampled([], [])
        return self.sampler.sample(logits, [batch.sequences[i] for i in rows.sampling])


def _broken_rows(hidden: Tensor, rows: StepRows) -> frozenset[int]:
    """Sequences with a NaN or Inf in any of this step's tokens, sampled or not.

    A row whose prompt broke in an early chunk must end there: later chunks may look well and be wrong.
    """
    finite = hidden.float().sum(-1).isfinite()
    if bool(finite.all()):
        return frozenset()
    tokens = torch.nonzero(~finite).squeeze(1)
    ends = torch.tensor(rows.starts[1:])
    return frozenset(torch.searchsorted(ends, tokens, right=True).tolist())


def _result(
    batch: Batch,
    rows: StepRows,
    broken: frozenset[int],
    sampled: Sampled,
    prepare_seconds: float,
    sample_seconds: float,
) -> StepResult:
    count = len(batch.sequences)
    tokens: list[int | None] = [None] * count
    logprobs: list[TokenLogprob | None] = [None] * count
    finite = [i not in broken for i in range(count)]
    for i, token, logprob in zip(rows.sampling, sampled.token_ids, sampled.logprobs, strict=True):
        finite[i] = finite[i] and token is not None
        if finite[i]:
            tokens[i], logprobs[i] = token, logprob
    return StepResult(tuple(tokens), tuple(finite), tuple(logprobs), prepare_seconds, sample_seconds)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A runner with what was decided while it was built."""

    runner: ModelRunner
    memory: MemoryPlan
    dtype: str
    device: str


def load_runner(checkpoint: Checkpoint, config: EngineConfig, eos_token_ids: frozenset[int]) -> Loaded:
    """Reads the weights, sizes key-value memory and joins them; ModelLoadError or OutOfMemory say why not.

    eos_token_ids: every id that ends a text; `min_tokens` holds them back.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype)
    set_threads(config.threads)
    check_weights_fit(checkpoint.spec, dtype, available_memory())
    spec = checkpoint.spec
    # Before the weights, so that a size that can never work does not wait for them; and after, when what
    # is left is known.
    plan_memory(spec, dtype, config)
    decoder = load_decoder(checkpoint, dtype, device)
    memory = plan_memory(spec, dtype, config, available_memory())
    storage = KVStorage(memory.num_blocks, spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, device)
    runner = ModelRunner(decoder, storage, Sampler(eos_token_ids))
    return Loaded(runner, memory, str(dtype).removeprefix("torch."), str(device))


def resolve_device(name: str) -> torch.device:
    """auto is the CPU: attention for CUDA does not exist yet, and asking for it is an error."""
    if name in ("auto", "cpu"):
        return torch.device("cpu")
    raise ModelLoadError(f"This version runs on device cpu only, not {name!r}.")


def resolve_dtype(name: str) -> torch.dtype:
    """auto is bfloat16 where the CPU multiplies it in hardware, else float32."""
    if name == "auto":
        name = "bfloat16" if _multiplies_bfloat16() else "float32"
    if name == "float16":
        raise ModelLoadError("dtype float16 is not computed on CPU; use float32 or bfloat16.")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelLoadError(f"dtype must be auto, float32 or bfloat16, not {name!r}.")
    return dtype


def _multiplies_bfloat16() -> bool:
    cpu = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def set_threads(threads: int | None) -> None:
    """Threads for arithmetic: as told, else one for each CPU that this process may use.

    torch counts the machine's cores, which in a container with fewer makes threads wait for one another.
    """
    if threads is None and "OMP_NUM_THREADS" in os.environ:
        return
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
