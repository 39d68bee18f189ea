"""Gemma 3 against transformers: two rotary bases, five windows to one layer that sees all and is scaled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family_checks import LOADERS, check_logits, check_tokens
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, save, tiny_model
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

from pagemill.engine.models.registry import describe

PLAIN = {"num_hidden_layers": 7, "sliding_window": 27, "query_pre_attn_scalar": 16}
BASES = {
    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
LINEAR = BASES | {"full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0}}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear scaling": {"rope_parameters": LINEAR},
    "capped logits": {"final_logit_softcapping": 8.0},
    "scores scaled by another size": {"query_pre_attn_scalar": 30},
    "other layers": {"num_hidden_layers": 3, "layer_types": ["full_attention", *["sliding_attention"] * 2]},
    "heads of 64, one for keys and values": {
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "num_key_value_heads": 1,
    },
}
IN_GGUF = ("plain", "linear scaling", "capped logits", "heads of 64, one for keys and values")


def model(**changes: Any) -> Gemma3ForCausalLM:
    tiny = tiny_model(Gemma3TextConfig(**(SIZES | PLAIN | changes)))
    assert isinstance(tiny, Gemma3ForCausalLM)
    return tiny


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    tiny = model(**changes)
    check_logits(tiny, save(tiny, tmp_path))


@pytest.mark.parametrize("name", IN_GGUF)
def test_logits_from_gguf_equal_transformers(name: str, tmp_path: Path) -> None:
    tiny = model(**VARIANTS[name])
    check_logits(tiny, LOADERS["gguf"](tiny, tmp_path))


def test_tokens_equal_transformers_however_they_are_run(tmp_path: Path) -> None:
    tiny = model(rope_parameters=LINEAR)
    check_tokens(tiny, save(tiny, tmp_path))


def test_tokens_from_gguf_equal_transformers(tmp_path: Path) -> None:
    tiny = model()
    check_tokens(tiny, LOADERS["gguf"](tiny, tmp_path), ["in chunks"])


def test_of_a_model_that_sees_images_the_text_part_is_read(tmp_path: Path) -> None:
    text = Gemma3TextConfig(**(SIZES | PLAIN | {"rope_parameters": LINEAR}))
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    tiny = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    tiny.requires_grad_(False)
    # The text part of it is a model of text of its own.
    alone = model(rope_parameters=LINEAR)
    tiny.model.language_model.load_state_dict(alone.model.state_dict())
    path = save(tiny, tmp_path)
    assert describe(path).family == "gemma3"
    check_logits(alone, path)
    # Releases before the fifth, and the files they have left, name the parts the other way round.
    rename_tensors(path, {"model.language_model.": "language_model.model.", "model.vision": "vision"})
    check_logits(alone, path)


def rename_tensors(path: Path, prefixes: dict[str, str]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    for old, new in prefixes.items():
        tensors = {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in tensors.items()}
    save_file(tensors, file)


def test_a_config_of_an_earlier_release_is_the_same_model(tmp_path: Path) -> None:
    tiny = model(rope_parameters=LINEAR)
    path = save(tiny, tmp_path) / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"], config["layer_types"]
    config |= {
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    }
    path.write_text(json.dumps(config))
    check_logits(tiny, tmp_path)
