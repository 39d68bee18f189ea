"""Tiny seeded models as files, transformers as the oracle over them, and a plain driver of a runner."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from pagemill.engine.batch import Batch, StepResult
from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.request import Request, SamplingParams
from pagemill.engine.run.rows import build_rows
from pagemill.engine.run.runner import ModelRunner
from pagemill.engine.run.sampler import Sampler
from pagemill.engine.sequence import Sequence
from pagemill.engine.weights.load import load_weights, open_checkpoint

BLOCK = 16
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


# Two layers of 64; 4 query heads on 2 key-value heads.
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**(SIZES | changes))


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    model = tiny_model(tiny_config(**changes), seed)
    assert isinstance(model, LlamaForCausalLM)
    return model


def tiny_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Random weights large enough that its favourite tokens vary and lie apart."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.eval().requires_grad_(False)
    # Gemma's norms multiply by 1 + weight.
    centre = 0.0 if config.model_type.startswith("gemma") else 1.0
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.uniform_(centre - 0.5, centre + 0.5)
        elif name.endswith("bias"):
            parameter.normal_(std=0.5)
        else:
            parameter.normal_(std=0.7 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5)
    return model


def save(model: PreTrainedModel, path: Path, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    return path


def reference_logits(model: PreTrainedModel, ids: Many[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits


def reference_greedy(model: PreTrainedModel, ids: Many[int], count: int) -> list[int]:
    """Greedy tokens, the whole text computed anew for each: nothing of transformers' caches is in it."""
    text = list(ids)
    for _ in range(count):
        text.append(int(reference_logits(model, text)[-1].argmax()))
    return text[len(ids) :]


def prompts(count: int, vocabulary: int = 211, seed: int = 1, longest: int = 70) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, vocabulary, random.integers(1, longest + 1)).tolist() for _ in range(count)]


# Running


def open_runner(
    path: Path, num_blocks: int = 200, dtype: torch.dtype = torch.float32, eos: frozenset[int] = frozenset()
) -> ModelRunner:
    """A runner whose memory is full of NaN, as fresh memory may be."""
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec
    decoder = load_weights(checkpoint, dtype, torch.device("cpu"))
    storage = KVStorage(
        num_blocks, spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, torch.device("cpu")
    )
    storage.tensor.fill_(torch.nan)
    return ModelRunner(decoder, storage, Sampler(eos))


def all_logits(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    """Logits of every position of a text, in one step."""
    seq = sequence(ids)
    switch = runner.decoder.spec.rope_switch
    seq.long_rope = switch is not None and len(ids) > switch
    seq.block_table = list(range(-(-len(ids) // BLOCK)))
    with torch.inference_mode():
        rows = build_rows(Batch((seq,), (len(ids),)), runner.storage)
        return runner.decoder.logits(runner.decoder.hidden(rows.inputs, runner.storage))


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0)


def sequence(
    ids: Many[int], params: SamplingParams | None = None, name: str = "row", seed: int = 0
) -> Sequence:
    return Sequence.of(Request(name, tuple(ids), params or greedy(1), seed=seed), 0)


class Driver:
    """Moves sequences through a runner by hand: blocks from a shuffled pool, any amount of work a step."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.free = np.random.default_rng(seed).permutation(runner.storage.num_blocks).tolist()

    def step(self, work: Many[tuple[Sequence, int]]) -> StepResult:
        for seq, new in work:
            while len(seq.block_table) * BLOCK < seq.num_computed_tokens + new:
                seq.block_table.append(self.free.pop())
        batch = Batch(tuple(seq for seq, _ in work), tuple(new for _, new in work))
        result = self.runner.execute(batch)
        for (seq, new), token in zip(work, result.token_ids, strict=True):
            seq.num_computed_tokens += new
            if token is not None:
                seq.token_ids.append(token)
        return result

    def finish(self, sequences: Many[Sequence], chunk: int = 10**6) -> list[list[int]]:
        """Every sequence to its max_tokens, all together, at most `chunk` tokens of each a step."""
        while live := [s for s in sequences if s.num_output_tokens < s.request.sampling.max_tokens]:
            result = self.step([(s, min(chunk, s.num_uncomputed_tokens)) for s in live])
            assert all(result.finite)
        for seq in sequences:
            self.release(seq)
        return [seq.output_token_ids for seq in sequences]

    def release(self, seq: Sequence) -> None:
        """Takes a sequence's memory away; it may be run again from its tokens."""
        self.free += seq.block_table
        seq.block_table = []
        seq.num_computed_tokens = 0
