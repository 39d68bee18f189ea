"""The Llama family against transformers, for each flag, from both kinds of file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_checks import LOADERS, check_logits, check_tokens
from tiny_models import (
    LLAMA3_ROPE,
    Driver,
    all_logits,
    greedy,
    open_runner,
    prompts,
    reference_greedy,
    reference_logits,
    save,
    sequence,
    tiny_llama,
)

# Of the scalings the original context is shorter than the texts that are tried.
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 70,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "one query head a group": {"num_key_value_heads": 4},
    "three query heads a group": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
    "four query heads a group": {"num_key_value_heads": 1},
    "head size 64": {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96},
    "head size 80": {"head_dim": 80},
    "head size 96": {"head_dim": 96},
    "head size 128": {"head_dim": 128},
    "tied embeddings": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "feed-forward bias": {"mlp_bias": True},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE, "head_dim": 64},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    "dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 4.0}},
    "yarn rope": {"rope_parameters": YARN},
    "yarn rope with its own magnitude and borders": {
        "rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "truncate": False}
    },
    "yarn rope with two magnitudes": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    "longrope": {"rope_parameters": LONGROPE},
    "another rope base and epsilon": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "rms_norm_eps": 1e-3,
    },
}
IN_GGUF = [
    *("one query head a group", "three query heads a group", "four query heads a group", "head size 64"),
    *("head size 80", "head size 96", "head size 128", "tied embeddings", "llama3 rope", "linear rope"),
    *("yarn rope", "longrope", "another rope base and epsilon"),
]
CASES = [(name, "safetensors") for name in VARIANTS] + [(name, "gguf") for name in IN_GGUF]


@pytest.mark.parametrize(("name", "loader"), CASES)
def test_logits_equal_transformers(name: str, loader: str, tmp_path: Path) -> None:
    tiny = tiny_llama(**VARIANTS[name])
    check_logits(tiny, LOADERS[loader](tiny, tmp_path))


@pytest.mark.parametrize("loader", LOADERS)
def test_tokens_equal_transformers_however_they_are_run(loader: str, tmp_path: Path) -> None:
    tiny = tiny_llama(rope_parameters=LLAMA3_ROPE)
    check_tokens(tiny, LOADERS[loader](tiny, tmp_path))


def test_tokens_equal_transformers_where_rows_outgrow_longrope(tmp_path: Path) -> None:
    tiny = tiny_llama(rope_parameters=LONGROPE)
    check_tokens(tiny, save(tiny, tmp_path), ["in chunks", "preempted"])


@pytest.mark.parametrize("chunk", [1, 7, 15, 16, 17, 1000])
def test_greedy_tokens_do_not_depend_on_the_chunk_size(chunk: int, tmp_path: Path) -> None:
    model = tiny_llama()
    some = prompts(5, longest=60)
    expected = [reference_greedy(model, ids, 12) for ids in some]
    assert (
        Driver(open_runner(save(model, tmp_path))).finish([sequence(i, greedy(12)) for i in some], chunk)
        == expected
    )


def test_bfloat16_runs_and_stays_near(tmp_path: Path) -> None:
    model = tiny_llama()
    runner = open_runner(save(model, tmp_path), dtype=torch.bfloat16)
    ids = prompts(1, longest=60)[0]
    near = all_logits(runner, ids)
    expected = reference_logits(model, ids)
    assert float((near - expected).abs().mean()) < 0.05 * float(expected.std())
    assert len(Driver(runner).finish([sequence(ids, greedy(5))])[0]) == 5
