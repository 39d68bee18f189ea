"""Models without a family of their own: run through transformers' code as it runs them, or refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checks import check_logits, check_tokens
from tiny_models import SIZES, save, tiny_model
from transformers import (
    AutoConfig,
    Cohere2Config,
    DeepseekV3Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
)

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.fallback import FallbackSpec
from pagemill.engine.models.probe import window_of
from pagemill.engine.run.trial import check_fallback
from pagemill.engine.weights.fallback import load_fallback
from pagemill.engine.weights.load import Checkpoint, open_checkpoint

PLAIN = {name: value for name, value in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
CPU = torch.device("cpu")

MODELS: dict[str, PreTrainedConfig] = {
    "gpt2: learned positions, biases": GPT2Config(
        vocab_size=211, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=None, eos_token_id=None
    ),
    "opt: positions with an offset": OPTConfig(
        vocab_size=211,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        word_embed_proj_dim=64,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "gpt-neox: parallel blocks, a quarter of each head turns": GPTNeoXConfig(**PLAIN),
    "granite: multipliers, scaled logits": GraniteConfig(
        **PLAIN, num_key_value_heads=2, logits_scaling=4.0, attention_multiplier=0.3, residual_multiplier=0.5
    ),
    "cohere 2: windows, and no positions where there are none": Cohere2Config(
        **PLAIN, num_key_value_heads=2, sliding_window=27, sliding_window_pattern=2, logit_scale=0.25
    ),
    "mixtral: experts": MixtralConfig(**PLAIN, num_key_value_heads=2, num_local_experts=4),
    "deepseek 3: values smaller than keys": DeepseekV3Config(
        **PLAIN,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}
COHERE = "cohere 2: windows, and no positions where there are none"


def opened(path: Path) -> tuple[Checkpoint, FallbackSpec]:
    checkpoint = open_checkpoint(path)
    assert checkpoint.family is None
    assert isinstance(checkpoint.spec, FallbackSpec)
    return checkpoint, checkpoint.spec


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_logits_equal_transformers(config: PreTrainedConfig, tmp_path: Path) -> None:
    tiny = tiny_model(config)
    path = save(tiny, tmp_path)
    check_logits(tiny, path)
    _, spec = opened(path)
    check_fallback(load_fallback(path, spec, torch.float32, CPU), torch.float32, CPU)


def test_tokens_equal_transformers_however_they_are_run(tmp_path: Path) -> None:
    tiny = tiny_model(MODELS[COHERE])
    check_tokens(tiny, save(tiny, tmp_path), ["in chunks", "without the prefix cache", "preempted"])


def test_what_memory_must_hold_is_known_before_weights_are_read(tmp_path: Path) -> None:
    tiny = tiny_model(MODELS[COHERE])
    _, spec = opened(save(tiny, tmp_path))
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.context) == (2, 2, 16, 512)
    assert spec.windows == (27, None)
    assert spec.parameters() == sum(parameter.numel() for parameter in tiny.parameters())


def test_a_model_that_computes_something_else_over_paged_memory_is_refused(tmp_path: Path) -> None:
    tiny = tiny_model(MODELS[COHERE])
    path = save(tiny, tmp_path)
    _, spec = opened(path)
    wrong = dataclasses.replace(spec, windows=(5, None))
    with pytest.raises(ModelLoadError, match="gives other logits over paged attention than by itself"):
        check_fallback(load_fallback(path, wrong, torch.float32, CPU), torch.float32, CPU)


def test_bfloat16_passes_the_trial(tmp_path: Path) -> None:
    path = save(tiny_model(MODELS[COHERE]), tmp_path)
    _, spec = opened(path)
    check_fallback(load_fallback(path, spec, torch.bfloat16, CPU), torch.bfloat16, CPU)


# What is refused


def config_of(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    known = AutoConfig.for_model(model_type)
    sizes = {name: value for name, value in SIZES.items() if hasattr(known, name)}
    config: dict[str, Any] = AutoConfig.for_model(model_type, **(sizes | changes)).to_dict()
    return config | {"architectures": [architecture]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an encoder-decoder": (
        config_of("t5", "T5ForConditionalGeneration", num_layers=2, d_kv=8, d_ff=16),
        "it is an encoder-decoder",
    ),
    "a recurrent state": (config_of("mamba", "MambaForCausalLM"), "keeps state other than keys and values"),
    "alibi": (config_of("bloom", "BloomForCausalLM", n_layer=2), "2 of its 2 layers do not go through"),
    "its own attention": (
        {"model_type": "falcon", "architectures": ["FalconForCausalLM"], "num_hidden_layers": 2},
        "its code knows no attention but its own",
    ),
    "attention sinks": (
        config_of("gpt_oss", "GptOssForCausalLM", num_local_experts=2, num_experts_per_tok=1),
        "its attention takes s_aux into account",
    ),
    "chunks": (
        config_of("llama4_text", "Llama4ForCausalLM", num_local_experts=2, intermediate_size_mlp=64),
        "some of its layers are of kind chunked_attention",
    ),
    "both ways": (config_of("bart", "BartForCausalLM", decoder_layers=2), "encoder-decoder"),
    "a classifier": (
        config_of("granite", "GraniteForSequenceClassification"),
        "for transformers it is no causal language model",
    ),
    "short convolutions": (
        config_of("lfm2", "Lfm2ForCausalLM", layer_types=["conv", "full_attention"]),
        "some of its layers are of kind conv",
    ),
    "longrope": (
        config_of(
            "phimoe",
            "PhimoeForCausalLM",
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 64,
                "short_mscale": 1.0,
                "long_mscale": 1.0,
            },
        ),
        "rows would depend on their neighbours",
    ),
    "remote code": (
        {
            "model_type": "homemade",
            "architectures": ["HomemadeForCausalLM"],
            "auto_map": {"AutoConfig": "configuration_homemade.HomemadeConfig"},
        },
        "it needs code of its own, which is never run",
    ),
    "an unknown type": (
        {"model_type": "homemade", "architectures": ["HomemadeForCausalLM"]},
        "its config is not understood",
    ),
}


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_run_is_refused_with_the_reason(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=reason) as refusal:
        open_checkpoint(tmp_path)
    assert "has no family of its own and cannot be run through transformers" in str(refusal.value)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = save(tiny_model(MODELS[COHERE]), tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    _, spec = opened(path)
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensors, first .*\.1\.mlp\.up_proj\.weight"):
        load_fallback(path, spec, torch.float32, CPU)


# Windows, read off the functions that transformers makes masks of


def test_windows_are_read_off_mask_functions() -> None:
    from transformers.masking_utils import (
        causal_mask_function,
        chunked_causal_mask_function,
        sliding_window_causal_mask_function,
    )

    assert window_of(causal_mask_function) is None
    for window in (1, 2, 4096, 131072):
        assert window_of(sliding_window_causal_mask_function(window)) == window
    with pytest.raises(ModelLoadError, match="chunks, not a window"):
        window_of(chunked_causal_mask_function(64, torch.tensor([0])))
    with pytest.raises(ModelLoadError, match="masked in a way of its own"):
        window_of(lambda row, head, query, key: key <= query + 1)
