"""Results that come a step late: what a row that has ended costs, and what waits for results."""

from __future__ import annotations

import pytest
from engine_fakes import FakeRunner, answer, fake_engine, prompt, request, run_all

from pagemill.engine.batch import Batch, ReadResult
from pagemill.engine.errors import StepTooLarge


def test_a_row_that_ends_by_count_is_never_run_once_too_often() -> None:
    runner = FakeRunner(64)
    run_all(fake_engine(runner=runner, late=True), [request("a", prompt(10), 5)])
    assert runner.computed == {"a": 10 + 4}
    runner = FakeRunner(64)
    run_all(fake_engine(runner=runner, late=True, context=14), [request("a", prompt(10), 50)])
    assert runner.computed == {"a": 10 + 3}


def test_a_row_that_stops_unforeseen_is_wasted_for_one_step() -> None:
    one = request("a", prompt(10), 50)
    stop = answer(one, 7)[-1]
    assert stop not in answer(one, 6)
    runner = FakeRunner(64)
    engine = fake_engine(runner=runner, late=True)
    done = run_all(engine, [request("a", prompt(10), 50, stop_token_ids=(stop,))])
    assert list(done["a"].token_ids) == answer(one, 7)
    assert runner.computed == {"a": 10 + 6 + 1}
    assert engine.metrics().generated_tokens == 7


def test_an_aborted_row_leaves_nothing_behind() -> None:
    engine = fake_engine(late=True)
    engine.add(request("a", prompt(20), 50))
    for _ in range(4):
        engine.step()
    assert engine.abort("a")
    assert engine.has_work
    done = []
    while engine.has_work:
        done += engine.step()
    assert [completion.finish_reason for completion in done] == ["abort"]
    assert engine.scheduler.pool.num_used == 0


def test_nobody_is_preempted_before_results_are_read() -> None:
    engine = fake_engine(num_blocks=4, late=True, prefix_cache=False)
    engine.scheduler.admission.growth = lambda seq: 0.0  # type: ignore[method-assign]
    preempt = engine.scheduler._preempt

    def watched(seq: object) -> None:
        assert not engine._begun
        preempt(seq)  # type: ignore[arg-type]

    engine.scheduler._preempt = watched  # type: ignore[method-assign]
    rows = [request(f"{n}", prompt(20, n), 20) for n in range(3)]
    done = run_all(engine, rows)
    assert engine.metrics().preemptions > 0
    for row in rows:
        assert list(done[row.request_id].token_ids) == answer(row, 20)


class Small(FakeRunner):
    """Has memory for steps of so many tokens."""

    most = 8

    def begin(self, batch: Batch) -> ReadResult:
        if batch.num_tokens > self.most:
            raise StepTooLarge("no memory")
        return super().begin(batch)


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_is_too_large_comes_again_in_smaller_ones(late: bool) -> None:
    engine = fake_engine(runner=Small(64), late=late)
    rows = [request(f"{n}", prompt(30 + n, n), 6) for n in range(12)]
    done = run_all(engine, rows)
    assert engine.scheduler.allowance.tokens == 8
    for row in rows:
        assert list(done[row.request_id].token_ids) == answer(row, 6)


def test_a_row_for_which_no_step_is_small_enough_ends_with_an_error() -> None:
    runner = Small(64)
    runner.most = 0
    done = run_all(fake_engine(runner=runner, late=True), [request("a", prompt(5), 3)])
    assert done["a"].error_code == "engine_error"
    assert "no memory" in (done["a"].error_message or "")
