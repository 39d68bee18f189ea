"""Counting: what a step adds, and rates that follow the work."""

from __future__ import annotations

import pytest
from engine_fakes import fake_engine, prompt, request, run_all

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


# Over a whole engine


def test_counters_of_a_run_agree_with_its_rows() -> None:
    """Two prompts of three blocks with two in common, one after the other; the clock ticks at each look."""
    engine = fake_engine(max_num_tokens=32)
    first, second = request("a", prompt(48), 4), request("b", [*prompt(48)[:32], *prompt(16, 9)], 6)
    done = run_all(engine, [first]) | run_all(engine, [second])
    found = engine.metrics()
    assert (found.running, found.waiting, found.rows_allowed, found.blocks_used) == (0, 0, 16, 0)
    assert (found.prompt_tokens, found.cached_tokens, found.hit_rate) == (96, 32, 1 / 3)
    assert (found.prefilled_tokens, found.generated_tokens, found.finished) == (48 + 16, 4 + 6, 2)
    # 48 tokens in chunks of 32 and 16, the last of which yields the first of 4 tokens; then 16, and 6.
    assert found.steps == (2 + 3) + (1 + 5)
    assert found.batch_fill == (48 + 3 + 16 + 5) / (found.steps * 32)
    assert found.schedule_seconds == pytest.approx(0.001 * found.steps)
    # Beginning a step and reading its result are a look each.
    assert found.forward_seconds == pytest.approx(0.002 * found.steps)
    assert found.finish_seconds == pytest.approx(0.001 * (found.steps + 2))  # each end looks at the clock too
    assert {c.usage.cached_tokens for c in done.values()} == {0, 32}


def test_preemptions_and_blocks_in_use_are_counted() -> None:
    engine = fake_engine(num_blocks=6, max_num_tokens=64)
    engine.scheduler.admission.growth = lambda seq: 0.0  # type: ignore[method-assign]
    rows = [request(f"{n}", prompt(30, n), 30) for n in range(3)]
    for row in rows:
        engine.add(row)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.metrics().blocks_used)
    assert most == 6
    assert engine.metrics().preemptions > 0


def test_a_rows_times_are_in_order() -> None:
    """The second row waits until the first has ended; both have all their moments."""
    engine = fake_engine(max_num_seqs=1)
    done = run_all(engine, [request("a", prompt(5), 4), request("b", prompt(5, 2), 4)])
    for completion in done.values():
        times = completion.timings
        assert times.started is not None and times.first_token is not None and times.finished is not None
        assert times.queued < times.started < times.first_token < times.finished
        assert completion.inter_token_seconds == pytest.approx((times.finished - times.first_token) / 3)
    first, second = done["a"].timings, done["b"].timings
    assert first.finished is not None and second.started is not None
    assert second.started > first.finished


def test_what_never_happened_has_no_time() -> None:
    engine = fake_engine()
    engine.add(request("a", prompt(5), 4))
    engine.abort("a")
    (aborted,) = engine.step()
    assert (aborted.timings.started, aborted.timings.first_token) == (None, None)
    assert aborted.inter_token_seconds is None
    assert run_all(engine, [request("b", prompt(5), 1)])["b"].inter_token_seconds is None
