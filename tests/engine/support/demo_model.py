"""The demo model, where it is, and transformers' form of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagemill.engine.weights.gguf import GGUFFile

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_model() -> Path:
    """The GGUF file; the test that asks is skipped where it was never fetched (infra/test fetches it)."""
    named = os.environ.get("PAGEMILL_DEMO_MODEL")
    path = Path(named) if named else Path(__file__).parents[3] / "models" / FILE
    if not path.is_file():
        pytest.skip(f"no demo model at {path}: infra/test fetches it, PAGEMILL_DEMO_MODEL may name it")
    return path


def as_transformers(path: Path) -> LlamaForCausalLM:
    """The same weights, dequantised and put in transformers' order by other code than the engine's."""
    file = GGUFFile(path)
    get = file.metadata
    heads, kv_heads = get["llama.attention.head_count"], get["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=get["llama.vocab_size"],
        hidden_size=get["llama.embedding_length"],
        intermediate_size=get["llama.feed_forward_length"],
        num_hidden_layers=get["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=get["llama.context_length"],
        rms_norm_eps=get["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": get["llama.rope.freq_base"]},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.model.embed_tokens.weight.copy_(file.read("token_embd.weight"))
    model.model.norm.weight.copy_(file.read("output_norm.weight"))
    for i, layer in enumerate(model.model.layers):
        for theirs, ours in {
            "attn_norm": layer.input_layernorm,
            "ffn_norm": layer.post_attention_layernorm,
            "attn_v": layer.self_attn.v_proj,
            "attn_output": layer.self_attn.o_proj,
            "ffn_gate": layer.mlp.gate_proj,
            "ffn_up": layer.mlp.up_proj,
            "ffn_down": layer.mlp.down_proj,
        }.items():
            ours.weight.copy_(file.read(f"blk.{i}.{theirs}.weight"))
        layer.self_attn.q_proj.weight.copy_(_halves(file.read(f"blk.{i}.attn_q.weight"), heads))
        layer.self_attn.k_proj.weight.copy_(_halves(file.read(f"blk.{i}.attn_k.weight"), kv_heads))
    return model


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Even rows of each head first, then the odd ones."""
    rows = torch.arange(weight.shape[0]).view(heads, -1)
    return weight[torch.cat([rows[:, 0::2], rows[:, 1::2]], 1).flatten()]
