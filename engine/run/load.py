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
from pagemill.engine.models.decoder import Decoder
from pagemill.engine.models.fallback import Fallback
from pagemill.engine.run.available import available_memory, give_back_freed
from pagemill.engine.run.card import Card
from pagemill.engine.run.card_load import fit_limits, measure_steps, most_blocks, storage_of, usable_bytes
from pagemill.engine.run.card_runner import CardRunner, put
from pagemill.engine.run.device import CPU, check_eight_bits, choose_card, resolve_dtype
from pagemill.engine.run.memory import MemoryPlan, memory_dtype, plan_memory, weight_bytes
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
from pagemill.kernels import cpu_threads

# What of a generation_config may stand in for a parameter that a request leaves open.
GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that running one model takes, but the scheduler. max_num_tokens, max_num_seqs: what a step
    may hold; None for the scheduler's own."""

    runner: ModelRunner | CardRunner
    tokenizer: Tokenizer
    info: ModelInfo
    max_num_tokens: int | None = None
    max_num_seqs: int | None = None


def load_model(
    config: EngineConfig, card: Card | None = None, checkpoint: Checkpoint | None = None
) -> LoadedModel:
    """Reads tokenizer and weights and takes memory; ModelLoadError or OutOfMemory say why that cannot be.

    card: where to run, instead of what the config's device names. checkpoint: where weights come from,
    instead of what lies at the config's model, which then gives the tokenizer alone.
    """
    card = card or choose_card(config.device)
    dtype = resolve_dtype(config.dtype, card)
    check_eight_bits(config, card)
    set_threads(config.threads)
    checkpoint = checkpoint or open_checkpoint(config.model)
    # Before the weights, so that what can never work does not wait for them.
    if config.deterministic:
        check_deterministic(checkpoint, dtype, card is not None)
    if card is None:
        return _on_cpu(config, checkpoint, dtype)
    with card.active():
        return _on_card(config, checkpoint, dtype, card)


def _on_cpu(config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> LoadedModel:
    spec = checkpoint.spec
    # Again after the weights, when what is left is known.
    plan_memory(spec, dtype, config, available_memory(), weights=weight_bytes(spec, dtype, config))
    tokenizer = Tokenizer.from_path(config.model)
    model = _weights(config, checkpoint, dtype, CPU)
    give_back_freed()
    memory = plan_memory(spec, dtype, config, available_memory())
    storage = KVStorage(memory.num_blocks, spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, CPU)
    info = _info(config, checkpoint, tokenizer, memory, dtype, CPU)
    runner = ModelRunner(model, storage, Sampler(info.eos_token_ids), config.shared_prefix_attention)
    # Steps may come from another thread than this one, with a team of its own.
    cpu_threads.dismiss()
    return LoadedModel(runner, tokenizer, info, config.max_num_tokens, config.max_num_seqs)


def _on_card(config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, card: Card) -> LoadedModel:
    spec = checkpoint.spec
    card.set_arithmetic(config.deterministic)
    weights, usable = weight_bytes(spec, dtype, config), usable_bytes(card)
    config = fit_limits(spec, dtype, config, usable - weights)
    most = most_blocks(spec, config)
    plan_memory(spec, dtype, config, usable, weights=weights, most_blocks=most)
    tokenizer = Tokenizer.from_path(config.model)
    model = _weights(config, checkpoint, dtype, card.device)
    step = measure_steps(model, dtype, config, card)
    memory = plan_memory(spec, dtype, config, usable_bytes(card), step=step, most_blocks=most)
    info = _info(config, checkpoint, tokenizer, memory, dtype, card.device)
    runner = CardRunner(
        model,
        storage_of(spec, memory.num_blocks, memory_dtype(dtype, config), card.device),
        Sampler(info.eos_token_ids, lambda tensor: put(card, tensor)),
        card,
        max_rows=config.max_num_seqs or 1,
        context=memory.context,
        share_prefixes=config.shared_prefix_attention,
        deterministic=config.deterministic,
    )
    return LoadedModel(runner, tokenizer, info, config.max_num_tokens, config.max_num_seqs)


def _weights(
    config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> Decoder | Fallback:
    model = load_weights(checkpoint, dtype, device, config.quantization, config.deterministic)
    if isinstance(model, Fallback):
        check_fallback(model, dtype, device)
    return model


def _info(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    memory: MemoryPlan,
    dtype: torch.dtype,
    device: torch.device,
) -> ModelInfo:
    spec = checkpoint.spec
    ends = frozenset(i for i in checkpoint.eos_token_ids | tokenizer.eos_token_ids if i < spec.vocab_size)
    return ModelInfo(
        name=Path(config.model).stem if Path(config.model).is_file() else Path(config.model).resolve().name,
        fingerprint=fingerprint(checkpoint, tokenizer, dtype, config),
        architecture=spec.architecture,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        context=memory.context,
        vocab_size=spec.vocab_size,
        num_blocks=memory.num_blocks,
        kv_tokens=memory.kv_tokens,
        eos_token_ids=ends,
        rope_switch=spec.rope_switch,
        generation_defaults=generation_defaults(checkpoint.generation),
    )


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
    if config.kv_cache_dtype:
        facts.append(f"keys and values in {config.kv_cache_dtype}")
    if config.deterministic and config.quantization is None and dtype != torch.float32:
        facts.append("deterministic")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def set_threads(threads: int | None) -> None:
    """Threads for arithmetic: as told, else one for each CPU that this process may use.

    torch counts the machine's cores, which in a container with fewer makes threads wait for one another.
    """
    if threads is None and "OMP_NUM_THREADS" in os.environ:
        return
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
