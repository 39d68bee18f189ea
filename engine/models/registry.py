"""Which families there are, and which one a model belongs to.

A model of another architecture, or with a flag that its family does not compute, is refused with the
reason: a wrong answer that looks like an answer is the worst outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models import llama
from pagemill.engine.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Family:
    """How a family is recognised and translated.

    gguf_name: our weight name to the file's. gguf_interleaved_heads: how many heads of a weight have
    their rows in llama.cpp's rotary order, 0 for none.
    """

    name: str
    architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    spec_from_config: Callable[[Mapping[str, Any]], DecoderSpec]
    spec_from_gguf: Callable[
        [Mapping[str, Any], Mapping[str, tuple[int, ...]], Callable[[str], Tensor]], DecoderSpec
    ]
    gguf_name: Callable[[str], str]
    gguf_interleaved_heads: Callable[[str, DecoderSpec], int]


FAMILIES = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        gguf_architectures=("llama",),
        spec_from_config=llama.spec_from_config,
        spec_from_gguf=llama.spec_from_gguf,
        gguf_name=llama.gguf_name,
        gguf_interleaved_heads=llama.gguf_interleaved_heads,
    ),
)


def family_of_config(config: Mapping[str, Any]) -> Family:
    """The family of a transformers config; raises ModelLoadError when there is none."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not architectures:
        raise ModelLoadError("config.json names no architecture.")
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            _refuse_quantized(config)
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ModelLoadError(f"The architecture {architectures[0]} is not supported; supported: {known}.")


def family_of_gguf(metadata: Mapping[str, Any]) -> Family:
    """The family of a GGUF file; raises ModelLoadError when there is none."""
    architecture = metadata.get("general.architecture")
    for family in FAMILIES:
        if architecture in family.gguf_architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.gguf_architectures)
    raise ModelLoadError(f"The GGUF architecture {architecture!r} is not supported; supported: {known}.")


def _refuse_quantized(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise ModelLoadError(
            f"The checkpoint is quantised ({method}); this version reads plain safetensors and GGUF only."
        )
