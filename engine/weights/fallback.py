"""A directory of safetensors whose model transformers computes: recognised by its config, read by its loader.

Knows configs and files. How the model runs is engine/models/fallback.py, and whether it can is probe.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.fallback import PAGED, Fallback, FallbackSpec, register
from pagemill.engine.models.probe import first_line, probe

# Kinds of layers in configs that keep, or see, something else than keys and values of earlier tokens.
OTHER_LAYERS = frozenset({"chunked_attention", "conv", "linear_attention", "mamba", "recurrent"})


def fallback_spec(path: Path, config: Mapping[str, Any]) -> FallbackSpec:
    """What transformers' form of this model is; ModelLoadError says why there is none that can be run."""
    import transformers

    architecture = str(config["architectures"][0])
    try:
        loaded = _config(path, config)
        text = loaded.get_text_config(decoder=True)
        _refuse(loaded, text, architecture)
        origin = f"transformers {transformers.__version__} {json.dumps(config, sort_keys=True)}"
        spec = probe(loaded, architecture, origin)
        if spec.context < 1:
            raise ModelLoadError("its config gives no max_position_embeddings")
        return spec
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{architecture} has no family of its own and cannot be run through transformers: "
            f"{str(error).rstrip('.')}."
        ) from error


def _config(path: Path, config: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        # Of many kinds: an unknown model_type, code of its own, a value that validation refuses.
        if "auto_map" in config:
            raise ModelLoadError("it needs code of its own, which is never run") from error
        raise ModelLoadError(f"its config is not understood ({first_line(error)})") from error


def _refuse(config: Any, text: Any, architecture: str) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.is_encoder_decoder:
        raise ModelLoadError("it is an encoder-decoder")
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None or found.__name__ != architecture:
        raise ModelLoadError(f"for transformers it is no causal language model ({type(config).__name__})")
    if found._is_stateful:
        raise ModelLoadError("it keeps state other than keys and values (recurrent or convolutional layers)")
    kinds = set(getattr(text, "layer_types", None) or ())
    if others := sorted(kinds & OTHER_LAYERS):
        raise ModelLoadError(f"some of its layers are of kind {', '.join(others)}")
    if "longrope" in _rope_types(text.to_dict()):
        raise ModelLoadError(
            "transformers turns its longrope by the longest text of a batch, so that rows would depend on "
            "their neighbours"
        )


def _rope_types(values: Mapping[str, Any]) -> Iterator[str]:
    rope = values.get("rope_parameters") or {}
    for section in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        yield str(section.get("rope_type"))


def load_fallback(path: Path, spec: FallbackSpec, dtype: torch.dtype, device: torch.device) -> Fallback:
    """Reads every weight. One that is missing or left over is a ModelLoadError that names it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    register()
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            str(path),
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            attn_implementation=PAGED,
            dtype=dtype,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelLoadError(f"{path} cannot be read ({first_line(error)}).") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    for key, what in (
        ("missing_keys", "lacks"),
        ("mismatched_keys", "has in another shape"),
        ("unexpected_keys", "gives no use for"),
    ):
        if names := sorted(map(str, found.get(key) or ())):
            raise ModelLoadError(f"{path} {what} {len(names)} tensors, first {names[0]}.")
    return Fallback(spec, model.eval().requires_grad_(False).to(device))
