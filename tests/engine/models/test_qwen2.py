"""Qwen2 against transformers: biases, windows on the upper layers, yarn beyond the original context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_checks import LOADERS, check_logits, check_tokens
from tiny_models import SIZES, save, tiny_model
from transformers import PreTrainedModel, Qwen2Config

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "seven query heads a group": {"num_attention_heads": 14, "hidden_size": 14 * 16},
    "tied": {"tie_word_embeddings": True},
    "yarn": {"rope_parameters": YARN},
    "yarn with narrow borders": {"rope_parameters": YARN | {"beta_fast": 8.0}},
    "window on the upper layer": WINDOW,
}
NOT_IN_GGUF = {"window on the upper layer"}  # nothing there to write it down in
CASES = [(n, loader) for n in VARIANTS for loader in LOADERS if loader != "gguf" or n not in NOT_IN_GGUF]


def model(**changes: Any) -> PreTrainedModel:
    # The config class has no head_dim: it is hidden_size / num_attention_heads.
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    return tiny_model(Qwen2Config(**(sizes | changes)))


@pytest.mark.parametrize(("name", "loader"), CASES)
def test_logits_equal_transformers(name: str, loader: str, tmp_path: Path) -> None:
    tiny = model(**VARIANTS[name])
    check_logits(tiny, LOADERS[loader](tiny, tmp_path))


def test_shards_are_one_model(tmp_path: Path) -> None:
    tiny = model()
    check_logits(tiny, save(tiny, tmp_path, max_shard_size="50KB"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 2


def test_tokens_equal_transformers_however_they_are_run(tmp_path: Path) -> None:
    tiny = model(**WINDOW, rope_parameters=YARN)
    check_tokens(tiny, save(tiny, tmp_path))


def test_tokens_from_gguf_equal_transformers(tmp_path: Path) -> None:
    tiny = model()
    check_tokens(tiny, LOADERS["gguf"](tiny, tmp_path), ["in chunks"])
