"""Mistral: a Llama whose layers all see a sliding window. Its GGUF files are of the Llama architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagemill.engine.models import dense, llama
from pagemill.engine.models.family import Family
from pagemill.engine.models.spec import DecoderSpec

ARCHITECTURE = "MistralForCausalLM"
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096 * 32,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    fields = dense.config_fields(config, DEFAULTS)
    fields.must_equal("hidden_act", "silu", "silu")
    spec = dense.from_config(fields, ARCHITECTURE)
    window = fields.optional_integer("sliding_window")
    return dense.check(replace(spec, windows=dense.every_layer([window] * spec.num_layers)))


FAMILY = Family(
    name="mistral",
    covers="Mistral 7B, Nemo, Small (text), with and without sliding windows",
    architectures=(ARCHITECTURE,),
    gguf_architectures=(),
    spec_from_config=spec_from_config,
    spec_from_gguf=llama.spec_from_gguf,
)
