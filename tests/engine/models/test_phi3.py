"""Phi-3 against transformers: fused weights, partial rotation, longrope on both sides of its border."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_checks import LOADERS, check_logits, check_tokens
from tiny_models import SIZES, save, tiny_model
from transformers import Phi3Config, PreTrainedModel


def longrope(pairs: int) -> dict[str, Any]:
    random = np.random.default_rng(4)
    return {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": random.uniform(1, 1.2, pairs).tolist(),
        "long_factor": random.uniform(1, 8, pairs).tolist(),
    }


# Texts of up to 60 tokens have the short factors.
LONGROPE = {"rope_parameters": longrope(8), "original_max_position_embeddings": 60}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window": {"sliding_window": 27},
    "longrope": LONGROPE,
    "longrope on a part of each head, in a window": {
        "rope_parameters": longrope(6) | {"partial_rotary_factor": 0.75},
        "original_max_position_embeddings": 60,
        "sliding_window": 100,
    },
    "half of each head, tied, groups of one": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
    },
    "heads of 96": {"hidden_size": 4 * 96},
}


def model(**changes: Any) -> PreTrainedModel:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    return tiny_model(Phi3Config(**(sizes | changes)))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_transformers(changes: dict[str, Any], loader: str, tmp_path: Path) -> None:
    tiny = model(**changes)
    check_logits(tiny, LOADERS[loader](tiny, tmp_path))


@pytest.mark.parametrize("loader", LOADERS)
def test_rows_that_outgrow_the_original_context_equal_transformers(loader: str, tmp_path: Path) -> None:
    """Some begin beyond the border, some cross it while they answer, one stays below."""
    tiny = model(**LONGROPE | {"original_max_position_embeddings": 70})
    check_tokens(tiny, LOADERS[loader](tiny, tmp_path))


def test_tokens_under_a_window_equal_transformers(tmp_path: Path) -> None:
    tiny = model(sliding_window=27)
    check_tokens(tiny, save(tiny, tmp_path), ["in chunks"])
