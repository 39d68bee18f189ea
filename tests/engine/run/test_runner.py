"""The runner: mixed batches, rows that depend on nothing but themselves, and rows that break alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import (
    BLOCK,
    Driver,
    greedy,
    open_runner,
    prompts,
    reference_greedy,
    save,
    sequence,
    tiny_llama,
)
from transformers import LlamaForCausalLM

from pagemill.engine.batch import Batch
from pagemill.engine.request import SamplingParams
from pagemill.engine.run.runner import ModelRunner
from pagemill.engine.sequence import Sequence


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def runner(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return open_runner(save(model, tmp_path_factory.mktemp("tiny")))


def test_a_row_samples_only_when_all_its_tokens_are_in(runner: ModelRunner) -> None:
    driver = Driver(runner)
    long, short = sequence(range(40)), sequence([1, 2, 3])
    first = driver.step([(long, 25), (short, 3)])
    assert first.token_ids[0] is None
    assert first.token_ids[1] is not None
    assert first.finite == (True, True)
    assert driver.step([(long, 15)]).token_ids[0] is not None


def test_prefill_chunks_and_decodes_share_a_step(runner: ModelRunner, model: LlamaForCausalLM) -> None:
    driver = Driver(runner)
    rows = [sequence(ids, greedy(10)) for ids in prompts(6)]
    random = np.random.default_rng(0)
    while live := [row for row in rows if row.num_output_tokens < 10]:
        chosen = [row for row in live if random.random() < 0.7] or live[:1]
        driver.step([(row, int(random.integers(1, row.num_uncomputed_tokens + 1))) for row in chosen])
    expected = [reference_greedy(model, row.request.prompt_token_ids, 10) for row in rows]
    assert [row.output_token_ids for row in rows] == expected


def test_a_preempted_row_goes_on_as_if_nothing_had_happened(
    runner: ModelRunner, model: LlamaForCausalLM
) -> None:
    driver = Driver(runner)
    ids = prompts(1, longest=50)[0]
    row, other = sequence(ids, greedy(12)), sequence([5, 6, 7], greedy(30))
    driver.step([(row, len(ids)), (other, 3)])
    for _ in range(5):
        driver.step([(row, 1), (other, 1)])
    driver.release(row)
    for _ in range(20):
        driver.step([(other, 1)])
    assert driver.finish([row], chunk=11) == [reference_greedy(model, ids, 12)]


def test_rows_that_share_blocks_read_the_same_prefix(runner: ModelRunner, model: LlamaForCausalLM) -> None:
    driver = Driver(runner)
    prefix = list(range(100, 100 + 2 * BLOCK))
    first = sequence([*prefix, 1, 2, 3], greedy(8))
    driver.step([(first, first.num_uncomputed_tokens)])
    second = sequence([*prefix, 9, 8], greedy(8))
    second.block_table = first.block_table[:2]
    second.num_computed_tokens = 2 * BLOCK
    driver.step([(first, 1), (second, 2)])
    while second.num_output_tokens < 8:
        driver.step([(second, 1)])
    assert second.output_token_ids == reference_greedy(model, [*prefix, 9, 8], 8)


def test_a_prompt_that_hits_completely_computes_its_last_token_again(
    runner: ModelRunner, model: LlamaForCausalLM
) -> None:
    driver = Driver(runner)
    ids = list(range(50, 50 + 2 * BLOCK))
    first = sequence(ids, greedy(4))
    driver.step([(first, len(ids))])
    second = sequence(ids, greedy(4))
    second.block_table = list(first.block_table)
    second.num_computed_tokens = len(ids) - 1
    driver.step([(second, 1)])
    second.block_table = second.block_table[:2]
    assert second.output_token_ids == reference_greedy(model, ids, 1)


# Independence


MIXED_PARAMS = [
    greedy(8),
    SamplingParams(max_tokens=8, temperature=1.0),
    SamplingParams(max_tokens=8, temperature=0.7, top_p=0.9),
    SamplingParams(max_tokens=8, temperature=1.3, top_k=20, min_p=0.02),
    SamplingParams(max_tokens=8, temperature=0.9, presence_penalty=0.6, frequency_penalty=0.3),
    SamplingParams(max_tokens=8, temperature=0.0, repetition_penalty=1.4, logit_bias=((3, 4.0),)),
]


def mixed_rows(seed: int = 3) -> list[Sequence]:
    return [
        sequence(ids, MIXED_PARAMS[i % len(MIXED_PARAMS)], name=str(i), seed=i)
        for i, ids in enumerate(prompts(12, seed=seed))
    ]


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> list[list[int]]:
    """What each row produces with nobody beside it, its prompt in one piece."""
    return [Driver(runner).finish([row])[0] for row in mixed_rows()]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_a_row_depends_on_nothing_but_itself(runner: ModelRunner, alone: list[list[int]], seed: int) -> None:
    """Random neighbours, chunks, places in memory and preemptions; the same tokens."""
    random = np.random.default_rng(seed)
    driver = Driver(runner, seed=seed)
    rows = mixed_rows()
    order = random.permutation(len(rows)).tolist()[: random.integers(1, len(rows) + 1)]
    chosen = [rows[i] for i in order]
    chunk = int(random.integers(1, 80))
    preemptions = 3  # with more, one-token chunks might never get through a prompt
    while live := [row for row in chosen if row.num_output_tokens < 8]:
        part = [row for row in live if random.random() < 0.8] or live[:1]
        driver.step([(row, int(min(chunk, row.num_uncomputed_tokens))) for row in part])
        if preemptions and random.random() < 0.2:
            driver.release(part[0])
            preemptions -= 1
    assert [row.output_token_ids for row in chosen] == [alone[i] for i in order]


def test_the_order_of_rows_in_a_batch_changes_nothing(runner: ModelRunner) -> None:
    def run(order: list[int]) -> dict[str, float]:
        rows = mixed_rows()
        for row in rows:
            params = dataclasses.replace(row.request.sampling, logprobs=3)
            row.request = dataclasses.replace(row.request, sampling=params)
        driver = Driver(runner)
        found: dict[str, float] = {}
        for step in range(3):
            result = driver.step([(rows[i], rows[i].num_uncomputed_tokens) for i in order])
            for i, logprob in zip(order, result.logprobs, strict=True):
                assert logprob is not None
                found[f"{i}.{step}: {logprob.token_id}"] = logprob.logprob
        return found

    assert run(list(range(12))) == pytest.approx(run(list(range(11, -1, -1))), abs=1e-5)


# Broken numbers


def test_a_row_with_broken_numbers_ends_alone(runner: ModelRunner) -> None:
    rows = [sequence(ids, greedy(3), name=str(i)) for i, ids in enumerate(prompts(5))]
    clean = [Driver(runner).finish([sequence(row.request.prompt_token_ids, greedy(3))])[0] for row in rows]
    driver = Driver(runner)
    driver.step([(row, row.num_uncomputed_tokens) for row in rows])
    runner.storage.tensor[rows[2].block_table[0]] = torch.nan
    for _ in range(2):
        result = driver.step([(row, row.num_uncomputed_tokens) for row in rows])
        assert result.finite == (True, True, False, True, True)
        assert result.token_ids[2] is None
        rows[2].token_ids.append(1)
    assert [row.output_token_ids for i, row in enumerate(rows) if i != 2] == [
        tokens for i, tokens in enumerate(clean) if i != 2
    ]


def test_a_prompt_that_breaks_in_an_early_chunk_says_so_there(runner: ModelRunner) -> None:
    embedding = runner.decoder.embedding
    kept = embedding[7].clone()
    try:
        embedding[7] = torch.inf
        driver = Driver(runner)
        broken, well = sequence([1, 7, 2, *range(20, 40)]), sequence(range(60, 90))
        result = driver.step([(broken, 5), (well, 10)])
        assert result.finite == (False, True)
        assert result.token_ids == (None, None)
    finally:
        embedding[7] = kept


def test_memory_that_a_broken_row_leaves_behind_harms_nobody(
    runner: ModelRunner, model: LlamaForCausalLM
) -> None:
    runner.storage.tensor.fill_(torch.nan)
    ids = prompts(1, longest=40)[0]
    assert Driver(runner).finish([sequence(ids, greedy(8))], chunk=3) == [reference_greedy(model, ids, 8)]


# Impossible states


def test_a_row_without_memory_for_its_tokens_raises(runner: ModelRunner) -> None:
    row = sequence(range(20))
    row.block_table = [0]
    with pytest.raises(ValueError, match="1 blocks for 20 tokens"):
        runner.execute(Batch((row,), (20,)))


def test_times_are_split(runner: ModelRunner) -> None:
    result = Driver(runner).step([(sequence([1, 2]), 2)])
    assert result.prepare_seconds > 0
    assert result.sample_seconds > 0


def test_a_second_runner_over_the_same_files_produces_the_same(
    runner: ModelRunner, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    again = open_runner(save(model, tmp_path))
    rows, others = mixed_rows(), mixed_rows()
    assert Driver(runner).finish(rows) == Driver(again).finish(others)
