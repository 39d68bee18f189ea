"""Gemma 2: norms on both sides, capped scores and logits, a window on every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from pagemill.engine.models import dense
from pagemill.engine.models.family import Family, Read, Shapes
from pagemill.engine.models.fields import Fields
from pagemill.engine.models.spec import DecoderSpec

ARCHITECTURE = "Gemma2ForCausalLM"
DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
GGUF_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Of GGUF files that do not say.
GGUF_DEFAULTS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
# llama.cpp knows the largest model by its layers: its scores are scaled by another size than its heads'.
LARGEST = 46


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    fields = dense.config_fields(config, DEFAULTS)
    spec = gemma_flags(fields, dense.from_config(fields, ARCHITECTURE))
    window = fields.optional_integer("sliding_window")
    windows = dense.windows_from_config(fields, spec.num_layers, window, lambda i: i % 2 == 0)
    return dense.check(replace(spec, windows=windows))


def gemma_flags(fields: Fields, spec: DecoderSpec) -> DecoderSpec:
    """What Gemma 2 and 3 have in common."""
    fields.must_equal("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    fields.must_equal("use_bidirectional_attention", False, False)
    bias = fields.boolean("attention_bias", False)
    return replace(
        gemma_arithmetic(spec),
        qkv_bias=bias,
        output_bias=bias,
        attention_scale=fields.positive("query_pre_attn_scalar") ** -0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        final_softcap=fields.optional_number("final_logit_softcapping"),
    )


def gemma_arithmetic(spec: DecoderSpec) -> DecoderSpec:
    scale = spec.hidden_size**0.5
    return replace(spec, post_norms=True, norm_offset=1.0, activation="gelu_tanh", embedding_scale=scale)


def spec_from_gguf(metadata: Mapping[str, Any], shapes: Shapes, read: Read) -> DecoderSpec:
    fields = dense.gguf_fields(metadata, "gemma2", GGUF_DEFAULTS)
    spec = gemma_arithmetic(dense.from_gguf(fields, ARCHITECTURE, shapes, read))
    return dense.check(
        replace(
            spec,
            attention_scale=scale_from_gguf(fields, spec, LARGEST),
            attention_softcap=fields.optional_number("attn_logit_softcapping"),
            final_softcap=fields.optional_number("final_logit_softcapping"),
            windows=dense.windows_from_gguf(fields, spec.num_layers, 2),
        )
    )


def scale_from_gguf(fields: Fields, spec: DecoderSpec, largest: int) -> float:
    """The file does not say; llama.cpp's rule stands for it."""
    size = spec.hidden_size // spec.num_heads if spec.num_layers == largest else spec.head_dim
    return fields.positive("attention.scale", size**-0.5)


def gguf_restore(name: str, tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """llama.cpp's converter adds the offset to norm weights."""
    return tensor - spec.norm_offset if name.endswith("norm.weight") else tensor


FAMILY = Family(
    name="gemma2",
    covers="Gemma 2",
    architectures=(ARCHITECTURE,),
    gguf_architectures=("gemma2",),
    spec_from_config=spec_from_config,
    spec_from_gguf=spec_from_gguf,
    gguf_names=GGUF_NAMES,
    gguf_restore=gguf_restore,
)
