"""What is refused at load, and that the refusal says why."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import tiny_config

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.registry import family_of_config, family_of_gguf
from pagemill.engine.models.spec import DecoderSpec


def config(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = tiny_config().to_dict() | {"architectures": ["LlamaForCausalLM"]}
    return plain | changes


def spec_of(values: dict[str, Any]) -> DecoderSpec:
    return family_of_config(values).spec_from_config(values)


def test_a_llama_is_recognised() -> None:
    spec = spec_of(config())
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.context) == (4, 2, 16, 512)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": None}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4, "factor": 4.0}},
            "scaling is 'spiral'",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "lacks factor"),
        ({"rope_parameters": "none"}, "rope_parameters must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"num_key_value_heads": 3}, "not a multiple of its 3"),
        ({"head_dim": 15}, "15 is odd"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, not '64'"),
        ({"hidden_size": True}, "hidden_size must be a whole number, not True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised \\(awq\\)"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        spec_of(config(**changes))


def test_configs_of_earlier_transformers_are_read() -> None:
    old = config(rope_theta=500_000.0)
    del old["rope_parameters"]
    old["rope_scaling"] = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = spec_of(old).rope
    assert (rope.theta, rope.scaling, rope.factor, rope.original_context) == (500_000.0, "llama3", 32.0, 8192)
    old["rope_scaling"] = {"type": "linear", "factor": 2.0}
    assert spec_of(old).rope.scaling == "linear"
    old["rope_scaling"] = None
    assert spec_of(old).rope.scaling == "none"


def test_what_a_config_leaves_out_has_transformers_defaults() -> None:
    spec = spec_of({"architectures": ["LlamaForCausalLM"], "vocab_size": 99})
    assert (spec.hidden_size, spec.num_layers, spec.head_dim, spec.context) == (4096, 32, 128, 2048)
    assert not spec.tied


# GGUF


def metadata(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.context_length": 512,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    return plain | {key.replace("__", "."): value for key, value in changes.items()}


def gguf_spec(values: dict[str, Any]) -> DecoderSpec:
    shapes = {"token_embd.weight": (100, 64)}
    return family_of_gguf(values).spec_from_gguf(values, shapes, lambda name: pytest.fail(name))


def test_a_gguf_llama_is_recognised() -> None:
    spec = gguf_spec(metadata())
    assert (spec.vocab_size, spec.head_dim, spec.tied, spec.rope.theta) == (100, 16, True, 10_000.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"general__architecture": "mamba"}, "'mamba' is not supported; supported: llama"),
        ({"general__architecture": None}, "None is not supported"),
        ({"llama__expert_count": 8}, "expert_count is 8"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count is 8"),
        ({"llama__attention__value_length": 8}, "attention.value_length is 8"),
        ({"llama__rope__scaling__type": "spiral"}, "scaling is 'spiral'"),
        ({"llama__embedding_length": None}, "lacks llama.embedding_length"),
        ({"llama__attention__head_count_kv": [2, 4]}, "must be a whole number"),
    ],
)
def test_a_gguf_that_would_be_computed_wrongly_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        gguf_spec(metadata(**changes))
