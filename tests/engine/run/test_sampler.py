"""What a request's parameters do to its next token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import greedy, sequence

from pagemill.engine.request import SamplingParams
from pagemill.engine.run.sampler import Sampler
from pagemill.engine.sequence import Sequence

EOS = 3
SAMPLER = Sampler(frozenset({EOS}))


def row(output: list[int] | None = None, seed: int = 0, **params: Any) -> Sequence:
    """A sequence with prompt [0, 1] and this output."""
    seq = sequence([0, 1], SamplingParams(**({"max_tokens": 100, "temperature": 0.0} | params)), seed=seed)
    seq.token_ids += output or []
    return seq


def next_token(logits: list[float], **options: Any) -> int | None:
    return SAMPLER.sample(torch.tensor([logits]), [row(**options)]).token_ids[0]


def test_greedy_takes_the_best() -> None:
    assert next_token([0.0, 2.0, 1.0, -1.0]) == 1


def test_explicit_zeros_are_greedy() -> None:
    logits = torch.randn(50, 200)
    for options in (
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 5.0, "top_k": 1},
    ):
        rows = [row(seed=i, **options) for i in range(50)]
        assert SAMPLER.sample(logits.clone(), rows).token_ids == logits.argmax(-1).tolist()


def test_presence_and_frequency_count_the_output_alone() -> None:
    assert next_token([2.0, 1.9, 0.0, 0.0], presence_penalty=1.0) == 0
    assert next_token([2.0, 1.9, 0.0, 0.0], output=[0], presence_penalty=0.2) == 1
    assert next_token([2.0, 1.9, 0.0, 0.0], output=[0], frequency_penalty=0.06) == 0
    assert next_token([2.0, 1.9, 0.0, 0.0], output=[0, 0], frequency_penalty=0.06) == 1


def test_repetition_counts_the_prompt_too() -> None:
    assert next_token([2.0, 1.0, 1.5, 0.0], repetition_penalty=1.5) == 2


def test_bias_is_added() -> None:
    assert next_token([2.0, 1.0, 0.0, 0.0], logit_bias=((2, 100.0),)) == 2
    assert next_token([2.0, 1.0, 0.0, 0.0], logit_bias=((0, -100.0), (1, 0.5))) == 1


def test_a_bias_for_no_token_means_nothing() -> None:
    assert next_token([2.0, 1.0], logit_bias=((99, 100.0), (-1, 100.0))) == 0


def test_min_tokens_holds_back_every_end() -> None:
    logits = [0.0, 1.0, 2.0, 9.0]
    assert next_token(logits, min_tokens=2) == 2
    assert next_token(logits, min_tokens=2, stop_token_ids=(2,)) == 1
    assert next_token(logits, min_tokens=2, stop_token_ids=(2,), logit_bias=((EOS, 100.0),)) == 1
    assert next_token(logits, output=[1], min_tokens=2) == 2
    assert next_token(logits, output=[1, 1], min_tokens=2) == EOS


def test_ignore_eos_leaves_the_choice_alone() -> None:
    assert next_token([0.0, 1.0, 2.0, 9.0], ignore_eos=True) == EOS


def test_a_token_depends_on_seed_sample_and_position() -> None:
    logits = torch.zeros(1, 5000)

    def drawn(**options: Any) -> int | None:
        return SAMPLER.sample(logits.clone(), [row(temperature=1.0, **options)]).token_ids[0]

    base = drawn(seed=7)
    assert drawn(seed=7) == base
    assert len({base, drawn(seed=8), drawn(seed=7, sample=1), drawn(seed=7, output=[2])}) == 4


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    expected = logits.log_softmax(-1)[0]
    options: dict[str, Any] = {"temperature": 0.5, "logit_bias": ((0, 50.0),), "logprobs": 2}
    result = SAMPLER.sample(logits.clone(), [row(**options)])
    logprob = result.logprobs[0]
    assert result.token_ids == [0]
    assert logprob is not None
    assert logprob.token_id == 0
    assert logprob.logprob == pytest.approx(float(expected[0]))
    assert [token for token, _ in logprob.top] == [1, 2]
    assert [value for _, value in logprob.top] == pytest.approx([float(expected[1]), float(expected[2])])


def test_each_row_gets_the_logprobs_it_asked_for() -> None:
    rows = [row(), row(logprobs=0), row(logprobs=3)]
    logprobs = SAMPLER.sample(torch.randn(3, 10), rows).logprobs
    assert logprobs[0] is None
    assert logprobs[1] is not None and logprobs[1].top == ()
    assert logprobs[2] is not None and len(logprobs[2].top) == 3


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_has_no_token_and_harms_no_other(broken: float, temperature: float) -> None:
    logits = torch.randn(3, 300)
    rows = [row(temperature=temperature, seed=i, logprobs=1) for i in range(3)]
    well = SAMPLER.sample(logits.clone(), rows)
    logits[1, 17] = broken
    result = SAMPLER.sample(logits, rows)
    assert result.token_ids == [well.token_ids[0], None, well.token_ids[2]]
    assert result.logprobs == [well.logprobs[0], None, well.logprobs[2]]


def test_greedy_and_drawn_rows_mix() -> None:
    logits = torch.randn(4, 500)
    rows = [row(), row(temperature=1.0, seed=1), row(), row(temperature=0.8, top_p=0.5, seed=2)]
    together = SAMPLER.sample(logits.clone(), rows).token_ids
    alone = [SAMPLER.sample(logits[i : i + 1].clone(), [rows[i]]).token_ids[0] for i in range(4)]
    assert together == alone


def test_no_rows_are_no_error() -> None:
    assert SAMPLER.sample(torch.empty(0, 10), []).token_ids == []
    assert greedy(1).temperature == 0
