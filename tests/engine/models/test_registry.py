"""How configs are read, what is refused, and that the refusal says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_gguf
from tiny_models import SIZES, save, tiny_config, tiny_llama, tiny_model
from transformers import GPTNeoXConfig

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models import gemma3, mistral, phi3, qwen2
from pagemill.engine.models.registry import FAMILIES, describe, family_of_config, family_of_gguf
from pagemill.engine.models.spec import DecoderSpec

NEOX = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}


def config(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = tiny_config().to_dict() | {"architectures": ["LlamaForCausalLM"]}
    return plain | changes


def spec_of(values: dict[str, Any]) -> DecoderSpec:
    family = family_of_config(values)
    assert family is not None
    return family.spec_from_config(values)


def test_a_llama_is_recognised() -> None:
    spec = spec_of(config())
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.context) == (4, 2, 16, 512)


def test_what_is_of_no_family_is_left_to_transformers() -> None:
    assert family_of_config({"architectures": ["MambaForCausalLM"]}) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": None}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (
            {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
            "scaling is 'proportional'",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "lacks factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor must be above 0"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8}}, "lacks short_factor or"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "has 1 divisors for 8 frequencies",
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
        ({"llama__rope__scaling__type": "longrope"}, "scaling is 'longrope'"),
        ({"llama__rope__scaling__type": "yarn"}, "lacks llama.rope.scaling.factor"),
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_attn_factor": 1.2},
            "yarn_attn_factor is 1.2",
        ),
        (
            {"llama__attention__sliding_window": 16, "llama__attention__sliding_window_pattern": 0},
            "pattern is 0",
        ),
        ({"llama__embedding_length": None}, "lacks llama.embedding_length"),
        ({"llama__attention__head_count_kv": [2, 4]}, "must be a whole number"),
    ],
)
def test_a_gguf_that_would_be_computed_wrongly_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        gguf_spec(metadata(**changes))


# What the families read


def test_yarn_stretches_the_context() -> None:
    """It is switched on by adding it to a config, whose max_position_embeddings stays as it was."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
    assert spec_of(config(rope_parameters=rope)).context == 2048


def test_dynamic_scaling_changes_nothing_within_the_context() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    spec = spec_of(config(rope_parameters=rope))
    assert (spec.rope.scaling, spec.context) == ("none", 512)


def test_a_window_that_is_null_is_none_and_one_that_is_absent_is_the_default() -> None:
    plain = config(architectures=["MistralForCausalLM"], num_hidden_layers=2)
    assert mistral.spec_from_config(plain).windows == (4096, 4096)
    assert mistral.spec_from_config(plain | {"sliding_window": None}).windows == ()


def test_qwen_has_windows_only_where_they_are_used() -> None:
    plain = config(num_hidden_layers=3, sliding_window=64, max_window_layers=1)
    assert qwen2.spec_from_config(plain).windows == ()
    assert qwen2.spec_from_config(plain | {"use_sliding_window": True}).windows == (None, 64, 64)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["full_attention"]}, "names 1 layers of 2"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "has 'linear_attention'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "its size is not given"),
        ({"layer_types": "full"}, "must be a list of strings"),
    ],
)
def test_layers_of_another_kind_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        qwen2.spec_from_config(config(**changes))


def test_what_gemma_3_cannot_compute_is_refused() -> None:
    plain = {"num_hidden_layers": 2, "sliding_window": 64}
    for changes, reason in (
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling is 'yarn'"),
        ({"rope_parameters": {"rope_type": "default"}}, "not by kind of layer"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0"),
    ):
        with pytest.raises(ModelLoadError, match=reason):
            gemma3.spec_from_config(plain | changes)


def test_phi_3_has_an_original_context_of_its_own() -> None:
    rope = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    with pytest.raises(ModelLoadError, match="scaling is 'su'"):
        spec_of(config(rope_scaling=rope))
    values = config(rope_scaling=rope, max_position_embeddings=131072, head_dim=None)
    del values["rope_parameters"]
    spec = phi3.spec_from_config(values)
    assert (spec.rope_switch, spec.context) == (4096, 131072)
    assert spec.rope.attention_factor == pytest.approx(1.190238)
    with pytest.raises(ModelLoadError, match="turns 7 of a head's 16 dimensions"):
        phi3.spec_from_config(config(partial_rotary_factor=0.45))


# How a path would be run


def test_every_family_has_a_name_and_names_no_architecture_of_another() -> None:
    names = [name for family in FAMILIES for name in (*family.architectures, *family.gguf_architectures)]
    assert len(set(names)) == len(names)
    assert {family.name for family in FAMILIES} == {
        "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3",
    }  # fmt: skip


def test_a_path_is_described_without_its_weights_being_read(tmp_path: Path) -> None:
    llama, neox = save(tiny_llama(), tmp_path / "llama"), tmp_path / "neox"
    save(tiny_model(GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k in NEOX})), neox)
    gguf = write_gguf(tiny_llama(), tmp_path / "llama.gguf")
    found = [describe(path) for path in (llama, neox, gguf)]
    assert [(d.how, d.family, d.architecture) for d in found] == [
        ("family", "llama", "LlamaForCausalLM"),
        ("fallback", None, "GPTNeoXForCausalLM"),
        ("family", "llama", "LlamaForCausalLM"),
    ]
    missing = describe(tmp_path / "none")
    assert missing.how == "refused"
    assert missing.reason is not None and missing.reason.startswith("There is no model at")


def test_a_flag_that_a_family_does_not_compute_is_left_to_transformers(tmp_path: Path) -> None:
    path = save(tiny_llama(hidden_act="relu"), tmp_path)
    assert describe(path).how == "fallback"
    values = json.loads((path / "config.json").read_text()) | {"num_key_value_heads": 3}
    (path / "config.json").write_text(json.dumps(values))
    # Neither can: the family says it better.
    assert describe(path).reason is not None
    assert "hidden_act is 'relu'" in str(describe(path).reason)
