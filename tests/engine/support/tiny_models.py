"""Tiny seeded Llama models as files, transformers as the oracle over them, and a plain driver of a runner."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagemill.engine.batch import Batch, StepResult
from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.request import Request, SamplingParams
from pagemill.engine.run.runner import ModelRunner
from pagemill.engine.run.sampler import Sampler
from pagemill.engine.sequence import Sequence
from pagemill.engine.weights.load import load_decoder, open_checkpoint

BLOCK = 16
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_config(**changes: Any) -> LlamaConfig:
    """Two layers of 64; 4 query heads on 2 key-value heads."""
    settings: dict[str, Any] = {
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
    }
    return LlamaConfig(**(settings | changes))


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Random weights large enough that its favourite tokens vary and lie apart."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(**changes)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.normal_(std=0.5)
        else:
            parameter.normal_(std=0.7 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5)
    return model


def save(model: LlamaForCausalLM, path: Path, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    return path


def reference_logits(model: LlamaForCausalLM, ids: Many[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits


def reference_greedy(model: LlamaForCausalLM, ids: Many[int], count: int) -> list[int]:
    """Greedy tokens, the whole text computed anew for each: nothing of transformers' caches is in it."""
    text = list(ids)
    for _ in range(count):
        text.append(int(reference_logits(model, text)[-1].argmax()))
    return text[len(ids) :]


def prompts(count: int, vocabulary: int = 211, seed: int = 1, longest: int = 70) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, vocabulary, random.integers(1, longest + 1)).tolist() for _ in range(count)]


# GGUF


def write_gguf(
    model: LlamaForCausalLM,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """As llama.cpp's converter writes a Llama: rows of q and k reordered, llama3 scaling as a tensor."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if extra:
        extra(writer)
    rope = model.model.rotary_emb
    if rope.rope_type == "llama3":
        plain, _ = rope.compute_default_rope_parameters(config)
        writer.add_tensor("rope_freqs.weight", (plain / rope.inv_freq).numpy())
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            _add_tensor(writer, name, weight, config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    weight: torch.Tensor,
    config: LlamaConfig,
    kind: gguf.GGMLQuantizationType,
) -> None:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for projection, count in heads.items():
        if projection in name:
            weight = weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
    values = weight.float().contiguous().numpy()
    if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(gguf_name(name), values)
    else:
        writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)


def gguf_name(name: str) -> str:
    for ours, theirs in {
        "model.layers.": "blk.",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }.items():
        name = name.replace(ours, theirs)
    return name


# Running


def open_runner(
    path: Path, num_blocks: int = 200, dtype: torch.dtype = torch.float32, eos: frozenset[int] = frozenset()
) -> ModelRunner:
    """A runner whose memory is full of NaN, as fresh memory may be."""
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec
    decoder = load_decoder(checkpoint, dtype, torch.device("cpu"))
    storage = KVStorage(
        num_blocks, spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, torch.device("cpu")
    )
    storage.tensor.fill_(torch.nan)
    return ModelRunner(decoder, storage, Sampler(eos))


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
