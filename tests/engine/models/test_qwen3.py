"""Qwen3 against transformers: normalised queries and keys, a head size of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_checks import LOADERS, check_logits, check_tokens
from tiny_models import SIZES, save, tiny_model
from transformers import PreTrainedModel, Qwen3Config

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads of 128": {"head_dim": 128},
    "eight query heads a group": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "yarn": {"rope_parameters": YARN},
    "attention bias": {"attention_bias": True},
    "windows": {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 0},
}
NOT_IN_GGUF = {"attention bias", "windows"}  # nothing there to write it down in
CASES = [(n, loader) for n in VARIANTS for loader in LOADERS if loader != "gguf" or n not in NOT_IN_GGUF]


def model(**changes: Any) -> PreTrainedModel:
    return tiny_model(Qwen3Config(**(SIZES | changes)))


@pytest.mark.parametrize(("name", "loader"), CASES)
def test_logits_equal_transformers(name: str, loader: str, tmp_path: Path) -> None:
    tiny = model(**VARIANTS[name])
    check_logits(tiny, LOADERS[loader](tiny, tmp_path))


def test_tokens_equal_transformers_however_they_are_run(tmp_path: Path) -> None:
    tiny = model(rope_parameters=YARN)
    check_tokens(tiny, save(tiny, tmp_path))


def test_tokens_from_gguf_equal_transformers(tmp_path: Path) -> None:
    tiny = model()
    check_tokens(tiny, LOADERS["gguf"](tiny, tmp_path), ["in chunks"])
