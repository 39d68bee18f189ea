"""What a family is: how it is recognised, and how its files are translated into a DecoderSpec.

Knows no particular family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pagemill.engine.models.spec import DecoderSpec

Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[str], Tensor]

# Names of a GGUF file's tensors for ours; a layer's carry `blk.<i>.` for `model.layers.<i>.`.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def as_stored(name: str, tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """The tensor as it is: llama.cpp's converter changes nothing in most families."""
    return tensor


@dataclass(frozen=True, slots=True)
class Family:
    """How a family is recognised and translated.

    covers: models that are of it, for people.
    architectures: of config.json; gguf_architectures: `general.architecture` of GGUF files.
    gguf_names: where its GGUF names differ from the usual ones. gguf_restore: gives a tensor of a GGUF file,
        found by our name for it, the form that it has in transformers.
    text_prefixes, other_parts: what names begin with where a checkpoint holds a model of text among others.
    """

    name: str
    covers: str
    architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    spec_from_config: Callable[[Mapping[str, Any]], DecoderSpec]
    spec_from_gguf: Callable[[Mapping[str, Any], Shapes, Read], DecoderSpec]
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_restore: Callable[[str, Tensor, DecoderSpec], Tensor] = as_stored
    text_prefixes: tuple[str, ...] = ()
    other_parts: tuple[str, ...] = ()

    def safetensors_name(self, name: str, shapes: Shapes) -> str:
        """The name in a directory of safetensors of one of our weights."""
        for prefix in self.text_prefixes:
            for stored in (prefix + name, prefix + name.removeprefix("model.")):
                if stored in shapes:
                    return stored
        return name

    def other_part(self, name: str) -> bool:
        """Whether a tensor of a checkpoint belongs to a part that text has no use for."""
        return name.startswith(self.other_parts)

    def gguf_name(self, name: str) -> str:
        """The GGUF name of one of our weights."""
        module, _, kind = name.rpartition(".")
        prefix = ""
        if module.startswith("model.layers."):
            _, _, index, module = module.split(".", 3)
            prefix = f"blk.{index}."
        theirs = self.gguf_names.get(module) or GGUF_NAMES[module]
        return f"{prefix}{theirs}.{kind}"
