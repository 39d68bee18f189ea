"""Sizing of key-value memory, and messages that say what is missing and what would fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import OutOfMemory
from pagemill.engine.models.spec import DecoderSpec, RopeSpec
from pagemill.engine.run.memory import MemoryPlan, available_memory, check_weights_fit, plan_memory

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


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(OutOfMemory, match="the model's own is 1000"):
        plan(context=1001)


def test_a_budget_below_one_block_says_what_one_needs() -> None:
    with pytest.raises(OutOfMemory, match=r"kv_cache_gb 1e-06 holds no block of .* one needs 32\.0 KiB"):
        plan(kv_cache_gb=1e-6)


@pytest.mark.parametrize(("free", "fits"), [(50 * ONE, 801), (0, 0), (-5 * ONE, 0), (ONE - 1, 0)])
def test_a_budget_beyond_what_is_free_says_what_would_fit(free: int, fits: int) -> None:
    with pytest.raises(
        OutOfMemory, match=f"num_blocks 100 needs .* are free; the largest context that fits is {fits} "
    ):
        plan(num_blocks=100, available=free)


def test_weights_beyond_what_is_free_are_refused_before_they_are_read() -> None:
    needed = SPEC.parameters() * 4
    check_weights_fit(SPEC, torch.float32, needed)
    check_weights_fit(SPEC, torch.float32, None)
    with pytest.raises(OutOfMemory, match=r"need \d\.\d\d MiB in float32 and \d\.\d\d MiB are free"):
        check_weights_fit(SPEC, torch.float32, needed - 1)


def test_int8_weights_need_a_byte_each_and_the_embedding_its_own_dtype() -> None:
    needed = SPEC.parameters() + SPEC.vocab_size * SPEC.hidden_size * 3
    check_weights_fit(SPEC, torch.float32, needed, "int8")
    with pytest.raises(OutOfMemory, match="in int8"):
        check_weights_fit(SPEC, torch.float32, needed - 1, "int8")


# What is free


def machine(tmp_path: Path, kib: int) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {kib} kB\n")
    return tmp_path


def group(tmp_path: Path, limit: str, used: int, inactive: int) -> None:
    directory = tmp_path / "sys/fs/cgroup"
    directory.mkdir(parents=True)
    (directory / "memory.max").write_text(limit + "\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_the_machines_memory_counts(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, 2048)) == 2048 * 1024


def test_a_control_groups_limit_counts_where_it_is_lower(tmp_path: Path) -> None:
    machine(tmp_path, 2048)
    group(tmp_path, "1000000", 600_000, 100_000)
    assert available_memory(tmp_path) == 500_000


def test_a_control_group_without_a_limit_does_not_count(tmp_path: Path) -> None:
    machine(tmp_path, 2048)
    group(tmp_path, "max", 600_000, 0)
    assert available_memory(tmp_path) == 2048 * 1024


def test_an_unknown_system_is_unknown(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
