"""Gemma 2 against transformers: norms on both sides, softcaps, a window on every second layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_checks import LOADERS, check_logits, check_tokens, text
from tiny_models import SIZES, all_logits, open_runner, reference_logits, save, tiny_model
from transformers import Gemma2Config, PreTrainedModel

from pagemill.engine.models import gemma2

# Caps that scores and logits of a tiny model reach.
PLAIN = {
    "num_hidden_layers": 4,
    "sliding_window": 27,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 8.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads of 256": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "scores scaled by another size": {"query_pre_attn_scalar": 30},
    "attention bias": {"attention_bias": True},
    "a head of its own": {"tie_word_embeddings": False},
    "windows on all layers but one": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
}
IN_GGUF = ("plain", "heads of 256")


def model(**changes: Any) -> PreTrainedModel:
    return tiny_model(Gemma2Config(**(SIZES | PLAIN | changes)))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    tiny = model(**changes)
    check_logits(tiny, save(tiny, tmp_path))


@pytest.mark.parametrize("name", IN_GGUF)
def test_logits_from_gguf_equal_transformers(name: str, tmp_path: Path) -> None:
    tiny = model(**VARIANTS[name])
    check_logits(tiny, LOADERS["gguf"](tiny, tmp_path))


def test_tokens_equal_transformers_however_they_are_run(tmp_path: Path) -> None:
    tiny = model()
    check_tokens(tiny, save(tiny, tmp_path))


def test_tokens_from_gguf_equal_transformers(tmp_path: Path) -> None:
    tiny = model()
    check_tokens(tiny, LOADERS["gguf"](tiny, tmp_path), ["in chunks"])


def test_norms_are_not_rounded_before_their_weight(tmp_path: Path) -> None:
    """In bfloat16 the order of Gemma's norms matters: as transformers, to a few roundings."""
    tiny = model(attn_logit_softcapping=None).to(torch.bfloat16)
    near = all_logits(open_runner(save(tiny, tmp_path), dtype=torch.bfloat16), text(40, seed=1))
    expected = reference_logits(tiny, text(40, seed=1)).float()
    assert float((near - expected).abs().mean()) < 0.05 * float(expected.std())


def test_of_the_largest_gguf_the_scale_is_by_hidden_size() -> None:
    """A file does not say how scores are scaled; llama.cpp goes by the number of layers."""
    metadata = {
        "gemma2.context_length": 8192,
        "gemma2.embedding_length": 4608,
        "gemma2.block_count": 46,
        "gemma2.feed_forward_length": 36864,
        "gemma2.attention.head_count": 32,
        "gemma2.attention.head_count_kv": 16,
        "gemma2.attention.key_length": 128,
        "gemma2.attention.layer_norm_rms_epsilon": 1e-6,
    }

    def no_tensor(name: str) -> torch.Tensor:
        raise AssertionError(name)

    spec = gemma2.spec_from_gguf(metadata, {}, no_tensor)
    assert spec.scale == 144**-0.5
    assert (spec.attention_softcap, spec.final_softcap) == (50.0, 30.0)
    spec = gemma2.spec_from_gguf(metadata | {"gemma2.block_count": 42}, {}, no_tensor)
    assert spec.scale == 128**-0.5
