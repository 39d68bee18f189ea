"""Rows that outgrow the context their keys were made for (longrope): computed anew, sharing nothing.

The fake model keeps a digest of every token with the kind of its keys, and stops where two kinds meet.
"""

from __future__ import annotations

import pytest
from engine_fakes import FakeRunner, answer, fake_engine, prompt, request, run_all

from pagemill.engine.engine import Engine

SWITCH = 40


def engine_over(runner: FakeRunner, cache: bool = True, budget: int = 64) -> Engine:
    return fake_engine(runner=runner, num_blocks=runner.num_blocks, prefix_cache=cache, max_num_tokens=budget)


@pytest.mark.parametrize("length", [SWITCH - 1, SWITCH, SWITCH + 1, 90])
@pytest.mark.parametrize("cache", [True, False], ids=["cached", "uncached"])
def test_a_row_is_computed_anew_once_when_it_outgrows(length: int, cache: bool) -> None:
    runner = FakeRunner(64, SWITCH)
    row = request("a", prompt(length), 20)
    done = run_all(engine_over(runner, cache), [row])
    assert list(done["a"].token_ids) == answer(row, 20)
    # The last token is never computed; what was below the border is computed twice.
    twice = SWITCH if length <= SWITCH else 0
    assert runner.computed["a"] == length + 20 - 1 + twice


def test_rows_on_both_sides_of_the_border_share_nothing() -> None:
    runner = FakeRunner(64, SWITCH)
    engine = engine_over(runner)
    run_all(engine, [request("short", prompt(36), 2)])
    long = run_all(engine, [request("long", prompt(36) + prompt(20, 5), 2)])["long"]
    assert long.usage.cached_tokens == 0
    again = run_all(engine, [request("again", prompt(36) + prompt(20, 6), 2)])["again"]
    assert again.usage.cached_tokens == 32


def test_a_row_that_outgrows_finds_what_others_computed_beyond_the_border() -> None:
    runner = FakeRunner(64, SWITCH)
    first, second = request("first", prompt(38), 20), request("second", prompt(38), 20)
    engine = engine_over(runner)
    run_all(engine, [first])
    done = run_all(engine, [second])
    assert list(done["second"].token_ids) == answer(second, 20)
    # 32 of the prompt's tokens at admission, then 48 of the same text on the other side.
    assert runner.computed["second"] < runner.computed["first"] - 32


def test_a_row_that_outgrows_when_memory_is_full_still_ends() -> None:
    rows = [request(str(i), prompt(30, i), 40) for i in range(4)]
    done = run_all(engine_over(FakeRunner(10, SWITCH), budget=17), rows)
    for row in rows:
        assert list(done[row.request_id].token_ids) == answer(row, 40)


@pytest.mark.parametrize("cache", [True, False], ids=["cached", "uncached"])
def test_a_row_that_gives_way_with_the_token_that_outgrows_comes_back_with_other_keys(cache: bool) -> None:
    runner = FakeRunner(64, SWITCH)
    rows = [request("old", prompt(8, 3), 30), request("new", prompt(SWITCH - 5), 20)]
    engine = engine_over(runner, cache)
    for row in rows:
        engine.add(row)
    done = {}
    while engine.has_work:
        for seq in engine.scheduler._running[1:]:
            if seq.num_tokens == SWITCH + 1 and not seq.long_rope:
                engine.scheduler._preempt(seq)
        done.update({completion.request_id: completion for completion in engine.step()})
        engine.scheduler.pool.check(seq.block_table for seq in engine.scheduler._running)
    assert engine.scheduler.preemptions == 1
    for row in rows:
        assert list(done[row.request_id].token_ids) == answer(row, row.sampling.max_tokens)
