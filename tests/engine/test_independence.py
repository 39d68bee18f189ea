"""A row's tokens are its own: whatever runs beside it, however it is scheduled, whatever is switched on.

A tiny model with seeded weights, float32 on CPU. Each row is run alone first, in an engine without any of
the advantages and with memory to spare; then it must get the same tokens in every company.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_fakes import FakeTokenizer, Late, check, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill.engine.batch import Runner
from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.config import ModelInfo, SchedulerConfig
from pagemill.engine.engine import Engine
from pagemill.engine.request import Request
from pagemill.engine.run.runner import ModelRunner
from pagemill.engine.run.sampler import Sampler

VOCAB, CONTEXT, BLOCKS = 97, 200, 48
SWITCHES = ("prefix_cache", "prefix_order", "long_rows_first", "learned_lengths", "identical_rows")
STEM = [1 + (7 * i) % (VOCAB - 1) for i in range(70)]

ROWS = [
    # prompt, answer, and how it is sampled
    (STEM[:1], 6, {"temperature": 0.0}),
    (STEM[:16], 20, {"temperature": 0.0}),
    (STEM[:33], 9, {"temperature": 1.0, "top_p": 0.9}),
    (STEM[:33], 9, {"temperature": 1.0, "top_p": 0.9, "sample": 1}),
    ([*STEM[:48], 5], 12, {"temperature": 0.7, "top_k": 20}),
    ([*STEM[:48], 6, 7], 3, {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5}),
    (
        STEM[20:64],
        17,
        {"temperature": 1.2, "min_p": 0.05, "min_tokens": 4, "stop_token_ids": (3, 4, 5, 6, 7, 8)},
    ),
    (STEM[:64], 25, {"temperature": 0.0, "logit_bias": ((9, 2.0),)}),
]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from pagemill.engine.weights.load import load_decoder, open_checkpoint

    path: Path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=CONTEXT, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    decoder = load_decoder(open_checkpoint(path), torch.float32, torch.device("cpu"))
    storage = KVStorage(BLOCKS, 2, 2, 8, torch.float32, torch.device("cpu"))
    storage.tensor.fill_(torch.nan)
    return ModelRunner(decoder, storage, Sampler(frozenset()))


def engine_over(runner: Runner, num_blocks: int, budget: int, seqs: int, switches: dict[str, bool]) -> Engine:
    info = ModelInfo("tiny", "", "", "float32", "cpu", CONTEXT, VOCAB, num_blocks, num_blocks * 16)
    limits = SchedulerConfig(num_blocks, CONTEXT, max_num_tokens=budget, max_num_seqs=seqs, **switches)
    return Engine(runner, FakeTokenizer(), info, limits)  # type: ignore[arg-type]


def row(name: str, kind: int, seed: int, group: str = "", priority: int = 0) -> Request:
    ids, max_tokens, sampling = ROWS[kind]
    return request(name, ids, max_tokens, seed=seed, group=group, priority=priority, **sampling)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> dict[tuple[int, int], tuple[int, ...]]:
    found = {}
    for kind in range(len(ROWS)):
        for seed in (0, 1):
            engine = engine_over(runner, BLOCKS, 512, 1, dict.fromkeys(SWITCHES, False))
            (completion,) = engine.run([row("alone", kind, seed)])
            found[kind, seed] = completion.token_ids
    return found


def test_the_rows_are_worth_comparing(alone: dict[tuple[int, int], tuple[int, ...]]) -> None:
    assert len(set(alone.values())) >= 11, "Seeds and samples make a difference where there is noise."
    for kind, (_, _, sampling) in enumerate(ROWS):
        assert (alone[kind, 0] == alone[kind, 1]) == (sampling["temperature"] == 0.0)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, len(ROWS) - 1),
            st.integers(0, 1),
            st.sampled_from(["", "job a", "job b"]),
            st.sampled_from([0, 0, 1]),
            st.integers(0, 6),
        ),
        min_size=1,
        max_size=14,
    ),
    num_blocks=st.integers(6, BLOCKS),
    budget=st.sampled_from([3, 15, 16, 17, 40, 512]),
    seqs=st.integers(1, 10),
    switches=st.fixed_dictionaries({name: st.booleans() for name in SWITCHES}),
    aborted=st.integers(0, 20),
    late=st.booleans(),
)
def test_a_rows_tokens_do_not_depend_on_its_company(
    runner: ModelRunner,
    alone: dict[tuple[int, int], tuple[int, ...]],
    rows: list[tuple[int, int, str, int, int]],
    num_blocks: int,
    budget: int,
    seqs: int,
    switches: dict[str, bool],
    aborted: int,
    late: bool,
) -> None:
    """Rows of all kinds arrive some steps apart; one of them may be aborted on the way, and results may come
    a step late."""
    engine = engine_over(Late(runner) if late else runner, num_blocks, budget, seqs, switches)
    done = {}
    for n, (kind, seed, group, priority, later) in enumerate(rows):
        engine.add(row(f"{n}", kind, seed, group, priority))
        for _ in range(later if engine.has_work else 0):
            done.update({completion.request_id: completion for completion in engine.step()})
    if engine.abort(f"{aborted}"):
        check(engine)
    while engine.has_work:
        done.update({completion.request_id: completion for completion in engine.step()})
    check(engine)
    assert engine.scheduler.pool.num_used == 0
    for n, (kind, seed, *_) in enumerate(rows):
        wanted, found = alone[kind, seed], done[f"{n}"]
        if found.finish_reason == "abort":
            assert n == aborted
            wanted = wanted[: len(found.token_ids)]
        assert found.token_ids == wanted, (n, ROWS[kind])
