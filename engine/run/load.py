"""From an EngineConfig to a runner, a tokenizer and what there is to know about them.

Decides device, dtype, threads and the size of key-value memory. It may not know the scheduler.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.config import EngineConfig, ModelInfo
from pagemill.engine.models.fallback import Fallback
from pagemill.engine.run.available import available_memory, give_back_freed
from pagemill.engine.run.memory import plan_memory, weight_bytes, widens
from pagemill.engine.run.runner import ModelRunner
from pagemill.engine.run.sampler import Sampler
from pagemill.engine.run.trial import check_fallback
from pagemill.engine.tokenizer import Tokenizer
from pagemill.engine.weights.load import (
    Checkpoint,
    check_deterministic,
    load_weights,
    open_checkpoint,
    weights_digest,
)

# What of a generation_config may stand in for a parameter that a request leaves open.
GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that running one model takes, but the scheduler."""

    runner: ModelRunner
    tokenizer: Tokenizer
    info: ModelInfo


def load_model(config: EngineConfig) -> LoadedModel:
    """Reads tokenizer and weights and takes memory; ModelLoadError or OutOfMemory say why that cannot be."""
    device = torch.device("cpu")
    dtype = resolve_dtype(config.dtype)
    set_threads(config.threads)
    checkpoint = open_checkpoint(config.model)
    spec = checkpoint.spec
    # Before the weights, so that what can never work does not wait for them; and after, when what is left
    # is known.
    if config.deterministic:
        check_deterministic(checkpoint, dtype)
    weights = weight_bytes(spec, dtype, config)
    plan_memory(spec, dtype, config, available_memory(), weights=weights)
    tokenizer = Tokenizer.from_path(config.model)
    model = load_weights(checkpoint, dtype, device, config.quantization, config.deterministic)
    if isinstance(model, Fallback):
        check_fallback(model, dtype)
    give_back_freed()
    memory = plan_memory(spec, dtype, config, available_memory())
    storage = KVStorage(memory.num_blocks, spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, device)
    ends = frozenset(i for i in checkpoint.eos_token_ids | tokenizer.eos_token_ids if i < spec.vocab_size)
    info = ModelInfo(
        name=Path(config.model).stem if Path(config.model).is_file() else Path(config.model).resolve().name,
        fingerprint=fingerprint(checkpoint, tokenizer, dtype, config),
        architecture=spec.architecture,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        quantization=config.quantization,
        context=memory.context,
        vocab_size=spec.vocab_size,
        num_blocks=memory.num_blocks,
        kv_tokens=memory.kv_tokens,
        eos_token_ids=ends,
        rope_switch=spec.rope_switch,
        generation_defaults=generation_defaults(checkpoint.generation),
    )
    runner = ModelRunner(model, storage, Sampler(ends), config.shared_prefix_attention)
    return LoadedModel(runner, tokenizer, info)


def generation_defaults(generation: Mapping[str, Any]) -> dict[str, object]:
    """What the model's authors say about sampling; `do_sample: false` means greedy."""
    defaults = {key: generation[key] for key in GENERATION_KEYS if generation.get(key) is not None}
    if generation.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def fingerprint(
    checkpoint: Checkpoint, tokenizer: Tokenizer, dtype: torch.dtype, config: EngineConfig
) -> str:
    """What decides the tokens, as a digest: weights (sampled), spec, ends, tokenizer, template, numbers."""
    facts = [
        weights_digest(checkpoint.files.files),
        repr(checkpoint.spec),
        repr(sorted(checkpoint.eos_token_ids)),
        repr(sorted(generation_defaults(checkpoint.generation).items())),
        tokenizer.fingerprint(),
        str(dtype),
    ]
    if config.quantization:
        facts.append(config.quantization)
    if widens(dtype, config):
        facts.append("deterministic")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def resolve_dtype(name: str) -> torch.dtype:
    """auto is bfloat16 where the CPU multiplies it in hardware, else float32."""
    if name == "auto":
        name = "bfloat16" if _multiplies_bfloat16() else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


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
