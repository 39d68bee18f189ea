"""Rows that share blocks: reading these once for all of them leaves every key, value and token as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import BLOCK, Driver, greedy, open_runner, reference_greedy, save, sequence, tiny_llama
from transformers import LlamaForCausalLM

from pagemill.engine.run.runner import ModelRunner
from pagemill.engine.sequence import Sequence

# More than one split of 256 keys, and not a multiple of it.
PROMPT = [(7 * i) % 211 for i in range(19 * BLOCK)]
QUESTIONS = [[50 + i, *range(3 * i)] for i in range(8)]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(head_dim=16, max_position_embeddings=512)


@pytest.fixture(scope="module")
def path(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("shared"))


def answer(runner: ModelRunner) -> list[Sequence]:
    """All questions behind one prompt whose blocks they share, a few of them a step later than the others."""
    driver = Driver(runner)
    first = sequence(PROMPT, greedy(1))
    driver.step([(first, len(PROMPT))])
    rows = []
    for question in QUESTIONS:
        row = sequence([*PROMPT, *question], greedy(6))
        row.block_table = list(first.block_table)
        row.num_computed_tokens = len(PROMPT)
        rows.append(row)
    driver.step([(row, row.num_uncomputed_tokens) for row in rows[:5]])
    while live := [row for row in rows if row.num_output_tokens < 6]:
        driver.step([(row, row.num_uncomputed_tokens) for row in live])
    return rows


def test_not_a_bit_changes_where_rows_read_their_prompt_together(path: Path, model: LlamaForCausalLM) -> None:
    together, apart = open_runner(path), open_runner(path)
    assert together.share_prefixes
    apart.share_prefixes = False
    rows, expected = answer(together), answer(apart)
    assert [row.output_token_ids for row in rows] == [row.output_token_ids for row in expected]
    # Blocks that nobody took are NaN, and NaN equals nothing.
    memory = [runner.storage.tensor.nan_to_num(0.0) for runner in (together, apart)]
    assert torch.equal(*memory)
    assert rows[7].output_token_ids == reference_greedy(model, [*PROMPT, *QUESTIONS[7]], 6)
