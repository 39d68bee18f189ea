"""Sizing of key-value memory, and messages that say what is missing and what would fit."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import EngineError, OutOfMemory
from pagemill.engine.models.spec import DecoderSpec, RopeSpec
from pagemill.engine.run.memory import MemoryPlan, plan_memory, size_text, step_bytes, weight_bytes

# One block: 4 layers, keys and values, 2 heads of 32, 16 tokens, 4 bytes.
ONE = 4 * 2 * 2 * 32 * 16 * 4
SPEC = DecoderSpec(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=128,
    intermediate_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    norm_eps=1e-5,
    context=1000,
    rope=RopeSpec(10_000.0),
)


def plan(available: int | None = None, dtype: torch.dtype = torch.float32, **config: Any) -> MemoryPlan:
    return plan_memory(SPEC, dtype, EngineConfig("model", **config), available)


def test_the_budget_is_filled_with_whole_blocks() -> None:
    result = plan(kv_cache_gb=10.5 * ONE / 2**30)
    assert (result.num_blocks, result.kv_tokens, result.kv_bytes) == (10, 160, 10 * ONE)
    assert plan(kv_cache_gb=10.5 * ONE / 2**30, dtype=torch.bfloat16).num_blocks == 21


def test_a_number_of_blocks_overrides_the_budget() -> None:
    assert plan(num_blocks=7, kv_cache_gb=1000.0).num_blocks == 7


def test_the_context_is_what_model_and_memory_allow() -> None:
    assert plan(num_blocks=500).context == 1000
    # The last token needs no memory of its own.
    assert plan(num_blocks=10).context == 161
    assert plan(num_blocks=10, context=100).context == 100


def test_a_context_that_does_not_fit_says_what_would() -> None:
    with pytest.raises(OutOfMemory) as error:
        plan(num_blocks=10, context=500)
    assert "A context of 500 tokens takes 1.00 MiB of memory (32 blocks)" in str(error.value)
    assert "num_blocks 10 gives 0.31 MiB (10 blocks); the largest context that fits is 161 tokens" in str(
        error.value
    )


def test_a_context_of_exactly_the_memory_fits() -> None:
    assert plan(num_blocks=10, context=161).context == 161
    with pytest.raises(OutOfMemory):
        plan(num_blocks=10, context=162)


@pytest.mark.parametrize("free", [1, 2, 9, 1234, 10**6, 10**9, 7_654_321_987])
def test_the_budget_that_a_refusal_names_fits(free: int) -> None:
    available = free * ONE + STEP
    with pytest.raises(OutOfMemory) as error:
        plan(kv_cache_gb=float(1 << 20), available=available)
    named = re.search(r"kv_cache_gb (\S+) fits", str(error.value))
    assert named is not None
    assert free - free // 50 <= plan(kv_cache_gb=float(named[1]), available=available).num_blocks <= free


@pytest.mark.parametrize("budget", [1e300, -1e300, math.inf, -math.inf, math.nan])
def test_a_budget_that_is_no_size_is_refused_in_a_sentence(budget: float) -> None:
    with pytest.raises(EngineError, match="kv_cache_gb must be a number up to 1048576, not "):
        plan(kv_cache_gb=budget)


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(OutOfMemory, match="the model's own is 1000"):
        plan(context=1001)


STEP = step_bytes(SPEC, torch.float32, EngineConfig("model"))


@pytest.mark.parametrize(("free", "fits"), [(50 * ONE, 801), (0, 0), (-5 * ONE, 0), (ONE - 1, 0)])
def test_a_budget_beyond_what_is_free_says_what_would_fit(free: int, fits: int) -> None:
    with pytest.raises(OutOfMemory, match=f"are free.* the largest context that fits is {fits} tokens"):
        plan(num_blocks=100, available=free + STEP)


def test_weights_memory_for_keys_and_a_step_have_to_fit_together() -> None:
    weights = weight_bytes(SPEC, torch.float32, EngineConfig("model"))
    config = EngineConfig("model", num_blocks=10)
    whole = weights + STEP + 10 * ONE
    for available in (whole, None):
        assert plan_memory(SPEC, torch.float32, config, available, weights=weights).num_blocks == 10
    with pytest.raises(OutOfMemory) as error:
        plan_memory(SPEC, torch.float32, config, whole - 1, weights=weights)
    said = str(error.value)
    for part in (
        f"{size_text(weights)} of weights in float32",
        f"{size_text(STEP)} for a step",
        f"{size_text(10 * ONE)} of key-value memory (num_blocks 10) are {size_text(whole)}",
        f"{size_text(whole - 1)} are free",
        "so that kv_cache_gb 0.000274658203125 fits",
        "the largest context that fits is 145 tokens",
    ):
        assert part in said


@pytest.mark.parametrize("budget", [-1.0, 0.0, 1e-6])
def test_a_budget_that_holds_nothing_says_what_one_needs_and_what_would_fit(budget: float) -> None:
    with pytest.raises(OutOfMemory) as error:
        plan(kv_cache_gb=budget, available=STEP + 50 * ONE)
    said = str(error.value)
    for part in (
        f"kv_cache_gb {budget:g} holds no block of 16 tokens: one needs 32.0 KiB",
        f"{size_text(STEP + 50 * ONE)} are free",
        "the largest context that fits is 801 tokens",
    ):
        assert part in said


def test_a_larger_step_needs_more() -> None:
    for larger in ({"max_num_tokens": 4096}, {"max_num_seqs": 256}):
        assert step_bytes(SPEC, torch.float32, EngineConfig("model", **larger)) > STEP


def test_int8_weights_need_a_byte_each_and_the_embedding_its_own_dtype() -> None:
    expected = SPEC.parameters() + SPEC.vocab_size * SPEC.hidden_size * 3
    assert weight_bytes(SPEC, torch.float32, EngineConfig("model", quantization="int8")) == expected
    assert weight_bytes(SPEC, torch.bfloat16, EngineConfig("model")) == 2 * SPEC.parameters()


def test_deterministic_takes_no_more_memory() -> None:
    config = EngineConfig("model", deterministic=True)
    assert weight_bytes(SPEC, torch.bfloat16, config) == 2 * SPEC.parameters()
    assert weight_bytes(SPEC, torch.float32, config) == 4 * SPEC.parameters()
