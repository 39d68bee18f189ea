"""Mistral against transformers: a window on every layer, smaller than the prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_checks import LOADERS, check_logits, check_tokens
from tiny_models import SIZES, save, tiny_model
from transformers import MistralConfig, PreTrainedModel

VARIANTS: dict[str, dict[str, Any]] = {
    "no window": {"sliding_window": None},
    "a window of one block": {"sliding_window": 16},
    "a window across blocks": {"sliding_window": 27},
    "a window of one token": {"sliding_window": 1},
    "heads of 80": {"head_dim": 80, "sliding_window": 100},
}


def model(**changes: Any) -> PreTrainedModel:
    return tiny_model(MistralConfig(**(SIZES | changes)))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    tiny = model(**changes)
    check_logits(tiny, save(tiny, tmp_path))


def test_tokens_equal_transformers_however_they_are_run(tmp_path: Path) -> None:
    tiny = model(sliding_window=27)
    check_tokens(tiny, save(tiny, tmp_path))


def test_a_gguf_without_a_window_equals_transformers(tmp_path: Path) -> None:
    tiny = model(sliding_window=None)
    path = LOADERS["gguf"](tiny, tmp_path)
    check_logits(tiny, path)
    check_tokens(tiny, path, ["in chunks"])
