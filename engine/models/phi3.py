"""Phi-3, 3.5 and 4: fused projections, longrope, and in some models a part of each head turns only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagemill.engine.models import dense
from pagemill.engine.models.family import Family, Read, Shapes
from pagemill.engine.models.fields import Fields
from pagemill.engine.models.rope_fields import rope_from_config
from pagemill.engine.models.spec import DecoderSpec, RopeSpec

ARCHITECTURE = "Phi3ForCausalLM"
DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
# What longrope was called in the configs of the first models.
LONGROPE_NAMES = {"su": "longrope", "yarn": "longrope"}
GGUF_NAMES = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    fields = dense.config_fields(config, DEFAULTS)
    fields.must_equal("hidden_act", "silu", "silu")
    spec = dense.from_config(fields, ARCHITECTURE, _rope)
    windows = dense.every_layer([fields.optional_integer("sliding_window")] * spec.num_layers)
    return dense.check(replace(spec, fused_weights=True, windows=windows))


def _rope(fields: Fields, head_dim: int) -> RopeSpec:
    return rope_from_config(fields, head_dim, partial=True, aliases=LONGROPE_NAMES)


def spec_from_gguf(metadata: Mapping[str, Any], shapes: Shapes, read: Read) -> DecoderSpec:
    fields = dense.gguf_fields(metadata, "phi3")
    spec = dense.from_gguf(fields, ARCHITECTURE, shapes, read)
    windows = dense.windows_from_gguf(fields, spec.num_layers, 1)
    return dense.check(replace(spec, fused_weights=True, windows=windows))


FAMILY = Family(
    name="phi3",
    covers="Phi-3, 3.5 and 4 (text), longrope included",
    architectures=(ARCHITECTURE,),
    gguf_architectures=("phi3",),
    spec_from_config=spec_from_config,
    spec_from_gguf=spec_from_gguf,
    gguf_names=GGUF_NAMES,
)
