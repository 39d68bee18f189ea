"""Writes a tiny model as llama.cpp's converter writes it: names by the gguf package, values changed as there.

It shares no table with the engine, so a mistake in one does not hide the same mistake in the other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import PreTrainedModel

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
F32 = gguf.GGMLQuantizationType.F32


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: gguf.GGMLQuantizationType = F32,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_sizes(writer, config)
    _add_rope(writer, model)
    _add_flags(writer, config)
    if extra:
        extra(writer)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            _add_tensor(
                writer, names.get_name(name, (".weight", ".bias")), _converted(name, weight, config), kind
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type not in ("qwen2", "phi3"):
        writer.add_key_length(_head_dim(config))
        writer.add_value_length(_head_dim(config))


def _add_rope(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.model_type in ("llama", "mistral", "phi3"):
        writer.add_rope_dimension_count(int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0)))
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "yarn":
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
    if kind == "longrope":
        writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling)
        for length in ("short", "long"):
            writer.add_tensor(f"rope_factors_{length}.weight", torch.tensor(rope[f"{length}_factor"]).numpy())
    if kind == "llama3":
        rotary = model.model.rotary_emb
        plain, _ = rotary.compute_default_rope_parameters(config)
        writer.add_tensor("rope_freqs.weight", (plain / rotary.inv_freq).numpy())


def _add_flags(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.model_type in ("gemma2", "gemma3_text", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _converted(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if config.model_type in ("llama", "mistral"):
        for projection, count in heads.items():
            if projection in name:
                weight = weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
    if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
        weight = weight + 1
    return weight


def _add_tensor(
    writer: gguf.GGUFWriter, name: str | None, weight: torch.Tensor, kind: gguf.GGMLQuantizationType
) -> None:
    assert name is not None
    values = weight.float().contiguous().numpy()
    if values.ndim == 1 or kind == F32:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
