"""Counting: what a step adds, and rates that follow the work."""

from __future__ import annotations

import pytest
from engine_fakes import prompt, request

from pagemill.engine.batch import Batch, StepResult
from pagemill.engine.metrics import Meter
from pagemill.engine.sequence import Sequence


def batch(*rows: tuple[int, int, int]) -> Batch:
    """Rows of (prompt tokens, output tokens, tokens scheduled), all else computed."""
    sequences = []
    for prompt_tokens, produced, scheduled in rows:
        seq = Sequence.of(request("r", prompt(prompt_tokens)), 0)
        seq.token_ids += [1] * produced
        seq.num_computed_tokens = len(seq.token_ids) - scheduled
        sequences.append(seq)
    return Batch(tuple(sequences), tuple(scheduled for _, _, scheduled in rows))


def result(tokens: int, count: int, prepare: float = 0.0, sample: float = 0.0) -> StepResult:
    ids = (1,) * tokens + (None,) * (count - tokens)
    return StepResult(ids, (True,) * count, (None,) * count, prepare, sample)


def test_a_decode_is_generation_and_everything_else_is_prefill() -> None:
    meter = Meter(token_budget=100)
    # A decode, a prompt of one token, a chunk of a prompt, a recompute after a preemption.
    meter.step(batch((5, 2, 1), (1, 0, 1), (40, 0, 30), (10, 9, 19)), result(3, 4), 0.0, 0.0, now=0.0)
    assert meter.generated == 3
    assert meter.prefilled == 1 + 30 + 19
    assert meter.batch_fill == 0.51


def test_the_time_of_a_step_is_split() -> None:
    meter = Meter(token_budget=1)
    meter.step(batch((1, 0, 1)), result(1, 1, prepare=0.1, sample=0.2), 0.05, 1.0, now=0.0)
    assert meter.schedule_s == 0.05
    assert meter.prepare_s == 0.1 and meter.sample_s == 0.2
    assert meter.forward_s == pytest.approx(0.7)


def test_a_rate_follows_the_last_seconds() -> None:
    meter = Meter(token_budget=1)
    assert meter.tokens_per_second(0.0) == 0.0
    for second in range(100):
        meter.step(batch((1, 0, 1)), result(1, 1), 0.0, 0.0, now=float(second))
    assert meter.tokens_per_second(99.0) == 1.0
    assert len(meter.recent) <= 11
    assert meter.tokens_per_second(200.0) == 0.0
    meter.step(batch((1, 0, 1)), result(1, 1), 0.0, 0.0, now=200.0)
    meter.step(batch((1, 0, 1)), result(1, 1), 0.0, 0.0, now=200.5)
    assert meter.tokens_per_second(200.5) == 2.0
