"""Qwen2 and 2.5: biases on queries, keys and values, and in some models windows on the upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagemill.engine.models import dense
from pagemill.engine.models.family import Family, Read, Shapes
from pagemill.engine.models.fields import Fields
from pagemill.engine.models.spec import DecoderSpec

ARCHITECTURE = "Qwen2ForCausalLM"
DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    fields = dense.config_fields(config, DEFAULTS)
    fields.must_equal("hidden_act", "silu", "silu")
    spec = dense.from_config(fields, ARCHITECTURE)
    return dense.check(replace(spec, qkv_bias=True, windows=windows(fields, spec.num_layers)))


def windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = (
        fields.optional_integer("sliding_window") if fields.boolean("use_sliding_window", False) else None
    )
    first = fields.integer("max_window_layers", least=0)
    return dense.windows_from_config(fields, num_layers, window, lambda i: window is not None and i >= first)


def spec_from_gguf(metadata: Mapping[str, Any], shapes: Shapes, read: Read) -> DecoderSpec:
    fields = dense.gguf_fields(metadata, "qwen2")
    return dense.check(dense.from_gguf(fields, ARCHITECTURE, shapes, read))


FAMILY = Family(
    name="qwen2",
    covers="Qwen2 and Qwen2.5",
    architectures=(ARCHITECTURE,),
    gguf_architectures=("qwen2",),
    spec_from_config=spec_from_config,
    spec_from_gguf=spec_from_gguf,
)
