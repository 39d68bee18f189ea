"""The Llama family: Llama 2 and 3.x, SmolLM2, and whoever else ships under the same architecture.

GGUF files of this architecture include Mistral; a window is not among what its converter writes down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from pagemill.engine.models import dense
from pagemill.engine.models.family import Family, Read, Shapes
from pagemill.engine.models.spec import DecoderSpec

ARCHITECTURE = "LlamaForCausalLM"
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    fields = dense.config_fields(config, DEFAULTS)
    fields.must_equal("hidden_act", "silu", "silu")
    bias = fields.boolean("attention_bias", False)
    spec = replace(
        dense.from_config(fields, ARCHITECTURE),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )
    return dense.check(spec)


def spec_from_gguf(metadata: Mapping[str, Any], shapes: Shapes, read: Read) -> DecoderSpec:
    fields = dense.gguf_fields(metadata, "llama")
    spec = dense.from_gguf(fields, ARCHITECTURE, shapes, read)
    fields.must_equal("rope.dimension_count", spec.head_dim, spec.head_dim)
    return dense.check(replace(spec, windows=dense.windows_from_gguf(fields, spec.num_layers, 1)))


def gguf_restore(name: str, tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """Rows of queries and keys of each head from (0, d/2, 1, d/2 + 1, ...) back to (0, 1, 2, ...).

    llama.cpp rotates dimensions 2i and 2i + 1 of this architecture; transformers, and we, i and
    i + head_dim / 2.
    """
    if ".q_proj." not in name and ".k_proj." not in name:
        return tensor
    per_head = tensor.reshape(-1, spec.head_dim // 2, 2, *tensor.shape[1:])
    return per_head.transpose(1, 2).reshape(tensor.shape)


FAMILY = Family(
    name="llama",
    covers="Llama 2, 3, 3.1, 3.2, 3.3 (text); SmolLM2; others under the same architecture",
    architectures=(ARCHITECTURE,),
    gguf_architectures=("llama",),
    spec_from_config=spec_from_config,
    spec_from_gguf=spec_from_gguf,
    gguf_restore=gguf_restore,
)
