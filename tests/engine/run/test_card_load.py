"""How large steps and memory are on a card; the whole of an engine on one that is not there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_fakes import request, run_all
from tiny_models import save, tiny_llama, tiny_model
from tiny_tokenizers import byte_level
from transformers import GPTNeoXConfig

from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import build_engine
from pagemill.engine.errors import EngineError, OutOfMemory
from pagemill.engine.models.spec import DecoderSpec, RopeSpec
from pagemill.engine.run.card_load import fit_limits, most_blocks, usable_bytes
from pagemill.engine.run.card_runner import CardRunner
from pagemill.engine.run.memory import plan_memory, step_bytes
from pagemill.engine.run.simulated_card import SimulatedCard
from pagemill.kernels.choice import triton_everywhere

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
GIB = 1 << 30
# Llama 3.1 8B.
LARGE = DecoderSpec(
    architecture="LlamaForCausalLM", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336,
    num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, norm_eps=1e-5, context=131_072,
    rope=RopeSpec(500_000.0),
)  # fmt: skip
CONFIG = EngineConfig("model")


def test_steps_are_large_where_they_fit_and_halved_until_they_do() -> None:
    large = fit_limits(LARGE, torch.bfloat16, CONFIG, 60 * GIB)
    assert (large.max_num_tokens, large.max_num_seqs) == (16_384, 1_024)
    small = fit_limits(LARGE, torch.bfloat16, CONFIG, 6 * GIB)
    assert small.max_num_tokens < 16_384 or small.max_num_seqs < 1_024
    assert step_bytes(LARGE, torch.bfloat16, small) <= 6 * GIB / 4
    none = fit_limits(LARGE, torch.bfloat16, CONFIG, 0)
    assert (none.max_num_tokens, none.max_num_seqs) == (512, 16)


def test_limits_that_were_asked_for_are_kept() -> None:
    asked = dataclasses.replace(CONFIG, max_num_tokens=8192, max_num_seqs=700)
    assert fit_limits(LARGE, torch.bfloat16, asked, 0) == asked
    half = fit_limits(LARGE, torch.bfloat16, dataclasses.replace(CONFIG, max_num_seqs=64), 3 * GIB)
    assert half.max_num_seqs == 64 and half.max_num_tokens < 16_384


def test_memory_is_what_is_left_but_for_a_reserve() -> None:
    card = SimulatedCard(memory=80 * GIB)
    usable = usable_bytes(card)
    assert usable == pytest.approx(0.92 * 80 * GIB)
    plan = plan_memory(LARGE, torch.bfloat16, CONFIG, usable, step=2 * GIB, most_blocks=10**6)
    assert plan.kv_bytes + 2 * GIB <= usable < plan.kv_bytes + 2 * GIB + plan.block_bytes
    asked = plan_memory(
        LARGE, torch.bfloat16, dataclasses.replace(CONFIG, kv_cache_gb=10.0), usable, most_blocks=10**6
    )
    assert asked.kv_bytes <= 10 * GIB < asked.kv_bytes + asked.block_bytes


def test_a_small_model_takes_no_more_of_a_card_than_it_can_use() -> None:
    most = most_blocks(LARGE, dataclasses.replace(CONFIG, max_num_seqs=2))
    assert plan_memory(LARGE, torch.bfloat16, CONFIG, 10**15, most_blocks=most).num_blocks == most == 4 * 8192


def test_a_model_that_a_card_cannot_hold_says_what_it_needs() -> None:
    with pytest.raises(OutOfMemory, match=r"15.00 GiB of weights in bfloat16, .*all that is left.*free"):
        plan_memory(LARGE, torch.bfloat16, CONFIG, 12 * GIB, weights=15 * GIB, most_blocks=10**6)


# A whole engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save(tiny_llama(vocab_size=300, num_hidden_layers=1, hidden_size=32, max_position_embeddings=96), path)
    byte_level().save_pretrained(path)
    return path


def config(path: Path, **changes: object) -> EngineConfig:
    settings: dict[str, object] = {"dtype": "float32", "max_num_tokens": 24, "max_num_seqs": 2, "threads": 1}
    return EngineConfig(str(path), **{**settings, **changes})  # type: ignore[arg-type]


def test_an_engine_on_a_card_answers_as_one_on_a_cpu(model: Path) -> None:
    rows = [request("a", list(range(5, 40)), 3, temperature=0.0), request("b", [7, 8, 9], 4, seed=1, top_k=9)]
    with triton_everywhere(), np.errstate(all="ignore"):
        engine = build_engine(config(model), card=SimulatedCard(memory=200 << 20))
        assert isinstance(engine.runner, CardRunner)
        found = run_all(engine, rows)
    assert (engine.limits.max_num_tokens, engine.limits.max_num_seqs) == (24, 2)
    assert engine.limits.num_blocks == 2 * 2 * 6
    assert engine.runner.storage.num_blocks == engine.limits.num_blocks + 1
    assert engine.runner.stats.graphs and engine.runner.stats.eager
    expected = run_all(build_engine(config(model, device="cpu", num_blocks=24)), rows)
    assert {n: done.token_ids for n, done in found.items()} == {
        n: done.token_ids for n, done in expected.items()
    }


def test_a_model_without_a_family_runs_without_graphs(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    path = save(tiny_model(GPTNeoXConfig(vocab_size=300, max_position_embeddings=96, **sizes)), tmp_path)
    byte_level().save_pretrained(path)
    rows = [request("a", list(range(5, 30)), 3, temperature=0.0)]
    with triton_everywhere(), np.errstate(all="ignore"):
        with pytest.raises(EngineError, match="deterministic cannot be promised"):
            build_engine(config(path, deterministic=True), card=SimulatedCard())
        engine = build_engine(config(path, num_blocks=8), card=SimulatedCard())
        found = run_all(engine, rows)
    assert isinstance(engine.runner, CardRunner) and engine.runner.graphs is None
    expected = run_all(build_engine(config(path, device="cpu", num_blocks=8)), rows)
    assert found["a"].token_ids == expected["a"].token_ids
