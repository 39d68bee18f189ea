"""The Llama family against transformers, for each flag, from both kinds of file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gguf import write_gguf
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
from transformers import LlamaForCausalLM

from pagemill.engine.run.runner import ModelRunner

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
    "another rope base and epsilon": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "rms_norm_eps": 1e-3,
    },
}
NOT_IN_GGUF = {"attention bias", "feed-forward bias", "linear rope"}


def check(model: LlamaForCausalLM, runner: ModelRunner) -> None:
    some = prompts(4, longest=150)
    for ids in some:
        torch.testing.assert_close(all_logits(runner, ids), reference_logits(model, ids), rtol=0, atol=1e-4)
    produced = Driver(runner).finish([sequence(ids, greedy(16)) for ids in some])
    assert produced == [reference_greedy(model, ids, 16) for ids in some]


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_safetensors_equal_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_llama(**changes)
    check(model, open_runner(save(model, tmp_path)))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in NOT_IN_GGUF])
def test_gguf_equals_transformers(name: str, tmp_path: Path) -> None:
    model = tiny_llama(**VARIANTS[name])
    check(model, open_runner(write_gguf(model, tmp_path / "tiny.gguf")))


@pytest.mark.parametrize("chunk", [1, 7, 15, 16, 17, 1000])
def test_greedy_tokens_do_not_depend_on_the_chunk_size(chunk: int, tmp_path: Path) -> None:
    model = tiny_llama()
    some = prompts(5, longest=60)
    expected = [reference_greedy(model, ids, 12) for ids in some]
    assert (
        Driver(open_runner(save(model, tmp_path))).finish([sequence(i, greedy(12)) for i in some], chunk)
        == expected
    )


def test_a_context_beyond_the_original_one_equals_transformers(tmp_path: Path) -> None:
    model = tiny_llama(rope_parameters=LLAMA3_ROPE)
    runner = open_runner(save(model, tmp_path))
    ids = prompts(1, longest=400, seed=5)[0] * 4
    ids = ids[:400]
    torch.testing.assert_close(all_logits(runner, ids), reference_logits(model, ids), rtol=0, atol=1e-4)


def test_bfloat16_runs_and_stays_near(tmp_path: Path) -> None:
    model = tiny_llama()
    runner = open_runner(save(model, tmp_path), dtype=torch.bfloat16)
    ids = prompts(1, longest=60)[0]
    near = all_logits(runner, ids)
    expected = reference_logits(model, ids)
    assert float((near - expected).abs().mean()) < 0.05 * float(expected.std())
    assert len(Driver(runner).finish([sequence(ids, greedy(5))])[0]) == 5
