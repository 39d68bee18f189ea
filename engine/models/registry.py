"""Which families there are, which one a model belongs to, and how a given one would be run.

A model with a flag that its family does not compute is refused with the reason: a wrong answer that looks
like an answer is the worst outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models import gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3
from pagemill.engine.models.family import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    phi3.FAMILY,
)


def family_of_config(config: Mapping[str, Any]) -> Family | None:
    """The family of a transformers config, None when it has none of its own.

    Raises ModelLoadError where the config names no architecture or its weights are quantised.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not architectures:
        raise ModelLoadError("config.json names no architecture.")
    _refuse_quantized(config)
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            return family
    return None


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


@dataclass(frozen=True, slots=True)
class Description:
    """How a model would be run: by one of FAMILIES, through transformers' own code, or not, and why not.

    architecture: the name that transformers has for it, None where it is refused.
    """

    path: Path
    how: Literal["family", "fallback", "refused"]
    family: str | None = None
    architecture: str | None = None
    reason: str | None = None


def describe(path: str | Path) -> Description:
    """Looks at a model's files without reading its weights; takes a second for a model without a family.

    What only the weights show (a missing tensor, logits that are not the model's own) can still refuse it.
    """
    # It asks this file which family a model is of.
    from pagemill.engine.weights.load import open_checkpoint

    path = Path(path)
    try:
        found = open_checkpoint(path)
    except ModelLoadError as error:
        return Description(path, "refused", reason=str(error))
    if found.family is None:
        return Description(path, "fallback", architecture=found.spec.architecture)
    return Description(path, "family", found.family.name, found.spec.architecture)
