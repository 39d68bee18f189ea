"""Qwen3: a head size of its own, and queries and keys normalised before they turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagemill.engine.models import dense, qwen2
from pagemill.engine.models.family import Family, Read, Shapes
from pagemill.engine.models.spec import DecoderSpec

ARCHITECTURE = "Qwen3ForCausalLM"
DEFAULTS = {**qwen2.DEFAULTS, "head_dim": 128}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    fields = dense.config_fields(config, DEFAULTS)
    fields.must_equal("hidden_act", "silu", "silu")
    spec = dense.from_config(fields, ARCHITECTURE)
    bias = fields.boolean("attention_bias", False)
    windows = qwen2.windows(fields, spec.num_layers)
    return dense.check(replace(spec, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows))


def spec_from_gguf(metadata: Mapping[str, Any], shapes: Shapes, read: Read) -> DecoderSpec:
    fields = dense.gguf_fields(metadata, "qwen3")
    return dense.check(replace(dense.from_gguf(fields, ARCHITECTURE, shapes, read), qk_norm=True))


FAMILY = Family(
    name="qwen3",
    covers="Qwen3, dense",
    architectures=(ARCHITECTURE,),
    gguf_architectures=("qwen3",),
    spec_from_config=spec_from_config,
    spec_from_gguf=spec_from_gguf,
)
