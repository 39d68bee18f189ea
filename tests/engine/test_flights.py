"""Identical requests: run once, answered each, and nobody's end is another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from engine_fakes import FakeRunner, FakeTokenizer, answer, check, fake_engine, prompt, request, run_all

from pagemill.engine.engine import Engine
from pagemill.engine.flights import identity
from pagemill.engine.request import Completion, Request


def finish(engine: Engine) -> dict[str, Completion]:
    return run_all(engine, [])


def widest(runner: FakeRunner) -> int:
    return max(len(batch.sequences) for batch in runner.batches)


def test_identical_requests_are_computed_once_and_answered_each() -> None:
    runner = FakeRunner(64)
    engine = fake_engine(runner=runner)
    rows = [request(f"r{n}", prompt(40), 8) for n in range(5)]
    done = run_all(engine, rows)
    assert sum(runner.computed.values()) == 40 + 7
    for row in rows:
        assert done[row.request_id].request_id == row.request_id
        assert list(done[row.request_id].token_ids) == answer(row, 8)
        assert done[row.request_id].usage.prompt_tokens == 40
        assert done[row.request_id].usage.completion_tokens == 8
    metrics = engine.metrics()
    assert (metrics.generated_tokens, metrics.prompt_tokens, metrics.finished) == (8, 40, 5)
    assert metrics.identical_rows == 4


def test_hits_of_the_prefix_cache_count_for_the_row_that_ran_alone() -> None:
    engine = fake_engine()
    run_all(engine, [request("before", prompt(40))])
    done = run_all(engine, [request(f"r{n}", prompt(40)) for n in range(3)])
    assert [done[f"r{n}"].usage.cached_tokens for n in range(3)] == [32, 0, 0]
    assert engine.metrics().cached_tokens == 32


def test_hits_count_for_who_remains_when_the_first_left_before_it_ran() -> None:
    engine = fake_engine(max_num_seqs=1)
    run_all(engine, [request("before", prompt(40))])
    engine.add(request("busy", prompt(8, 9), 4))
    engine.step()
    for name in "abc":
        engine.add(request(name, prompt(40)))
    engine.abort("a")
    done = finish(engine)
    assert [done[name].usage.cached_tokens for name in "abc"] == [0, 32, 0]
    assert engine.metrics().cached_tokens == 32


def test_switched_off_each_runs_on_its_own() -> None:
    runner = FakeRunner(64)
    engine = fake_engine(runner=runner, identical_rows=False, prefix_cache=False)
    run_all(engine, [request(f"r{n}", prompt(40), 8) for n in range(5)])
    assert sum(runner.computed.values()) == 5 * (40 + 7)
    assert engine.metrics().identical_rows == 0


BASE = request("base", prompt(20), 6, seed=1)


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, prompt_token_ids=tuple(prompt(20, 2))),
        replace(BASE, seed=2),
        replace(BASE, cache_salt="salt"),
        replace(BASE, group="another job"),
        replace(BASE, sampling=replace(BASE.sampling, sample=1)),
        replace(BASE, sampling=replace(BASE.sampling, max_tokens=5)),
        replace(BASE, sampling=replace(BASE.sampling, stop=("x",))),
        replace(BASE, sampling=replace(BASE.sampling, logprobs=0)),
    ],
    ids=["prompt", "seed", "salt", "group", "sample", "max_tokens", "stop", "logprobs"],
)
def test_requests_that_differ_in_anything_do_not_share(other: Request) -> None:
    runner = FakeRunner(64)
    engine = fake_engine(runner=runner)
    run_all(engine, [BASE, replace(other, request_id="other")])
    assert widest(runner) == 2
    assert engine.metrics().identical_rows == 0


@pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_k": 1}], ids=str)
def test_noise_does_not_tell_greedy_requests_apart(greedy: dict[str, float]) -> None:
    one, two = (
        request(f"r{n}", prompt(20), 6, seed=n, sample=n, priority=n, **greedy)  # type: ignore[arg-type]
        for n in range(2)
    )
    assert identity(one) == identity(two)
    drawn = (
        replace(row, sampling=replace(row.sampling, temperature=0.5, top_p=0.9, top_k=9))
        for row in (one, two)
    )
    assert len({identity(row) for row in drawn}) == 2


def test_who_comes_late_gets_what_there_is_and_its_own_times() -> None:
    runner = FakeRunner(64)
    engine = fake_engine(runner=runner)
    first, late = request("first", prompt(20), 10), request("late", prompt(20), 10)
    engine.add(first)
    for _ in range(5):
        engine.step()
    engine.add(late, stream=True)
    engine.step()
    (delta,) = engine.take_deltas()
    assert list(delta.token_ids) == answer(late, 6)
    assert delta.text == FakeTokenizer().decode(answer(late, 6))
    done = finish(engine)
    assert list(done["late"].token_ids) == list(done["first"].token_ids) == answer(first, 10)
    old, new = done["first"].timings, done["late"].timings
    assert old.first_token is not None and new.first_token is not None
    assert old.queued < old.first_token < new.queued == new.first_token
    assert old.finished == new.finished


def test_a_flight_that_has_ended_takes_nobody() -> None:
    runner = FakeRunner(64)
    engine = fake_engine(runner=runner, prefix_cache=False)
    run_all(engine, [request("a", prompt(20), 3)])
    run_all(engine, [request("b", prompt(20), 3)])
    assert runner.computed["a"] == runner.computed["b"]
    assert len(engine._flights) == len(engine._flights._open) == 0, "Memory grows with what has ended."


def test_each_stream_is_whole_and_stops_are_cut_for_all() -> None:
    tokens = [5, 6, 7, 8, 9]
    runner = FakeRunner(64, next=lambda ids, _seed: tokens[len(ids) - 3])
    engine = fake_engine(runner=runner)
    for name, stream in (("a", True), ("b", False), ("c", True)):
        engine.add(request(name, prompt(3), 5, stop=("<8>",)), stream=stream)
    deltas, done = [], {}
    while engine.has_work:
        done.update({completion.request_id: completion for completion in engine.step()})
        deltas += engine.take_deltas()
    for name in "abc":
        assert (done[name].text, done[name].finish_reason, done[name].stop_reason) == (
            "<5> <6> <7> ",
            "stop",
            "<8>",
        )
    for name in "ac":
        mine = [delta for delta in deltas if delta.request_id == name]
        assert "".join(delta.text for delta in mine) == done[name].text
        assert [token for delta in mine for token in delta.token_ids] == list(done[name].token_ids)
        assert mine[-1].completion == done[name]
    assert {delta.request_id for delta in deltas} == {"a", "c"}


@pytest.mark.parametrize("gone", ["first", "second"])
def test_an_abort_ends_one_rider_and_not_the_flight(gone: str) -> None:
    runner = FakeRunner(64)
    engine = fake_engine(runner=runner)
    rows = {name: request(name, prompt(20), 10) for name in ("first", "second")}
    for row in rows.values():
        engine.add(row)
    engine.step()
    engine.step()
    assert engine.abort(gone)
    check(engine)
    (aborted,) = engine.step()
    assert (aborted.request_id, aborted.finish_reason) == (gone, "abort")
    assert list(aborted.token_ids) == answer(rows[gone], 2)
    engine.add(rows[gone])  # its id is free again, and the flight still takes riders
    done = finish(engine)
    for name, row in rows.items():
        assert list(done[name].token_ids) == answer(row, 10)
    assert sum(runner.computed.values()) == 20 + 9


def test_the_last_to_leave_ends_the_row() -> None:
    engine = fake_engine()
    for name in ("a", "b"):
        engine.add(request(name, prompt(20), 50))
    engine.step()
    assert engine.abort("a") and engine.abort("b") and not engine.abort("a")
    assert engine.scheduler.num_running == engine.scheduler.pool.num_used == 0
    assert {c.finish_reason for c in engine.step()} == {"abort"}
    assert not engine.has_work


def test_a_row_that_fails_has_failed_one_and_the_others_run_again() -> None:
    """A broken answer is not handed on: whoever came second is not told of a failure that was not its own."""
    runner = FakeRunner(64, bad_rows={"a"})
    engine = fake_engine(runner=runner)
    rows = [request(name, prompt(20), 6) for name in "abc"]
    engine.add(rows[0])
    engine.add(rows[1], stream=True)
    engine.add(rows[2])
    done = finish(engine)
    assert done["a"].error_code == "numeric_error"
    for row in rows[1:]:
        assert list(done[row.request_id].token_ids) == answer(row, 6)
    deltas = engine.take_deltas()
    assert [token for delta in deltas for token in delta.token_ids] == answer(rows[1], 6)
    assert widest(runner) == 2, "They run each on its own."


def test_a_row_that_fails_late_shows_no_token_twice() -> None:
    runner = FakeRunner(64)
    engine = fake_engine(runner=runner)
    rows = [request(name, prompt(20), 8) for name in "ab"]
    for row in rows:
        engine.add(row, stream=True)
    for _ in range(4):
        engine.step()
    runner.bad_rows.add("a")
    done = finish(engine)
    deltas = engine.take_deltas()
    assert list(done["a"].token_ids) == answer(rows[0], 4) and done["a"].error_code == "numeric_error"
    shown = [token for delta in deltas if delta.request_id == "b" for token in delta.token_ids]
    assert shown == list(done["b"].token_ids) == answer(rows[1], 8)
    assert "".join(delta.text for delta in deltas if delta.request_id == "b") == done["b"].text


@pytest.mark.parametrize("how", ["abort", "failure", "failed engine"])
def test_a_stream_that_runs_again_ends_with_no_less_than_it_has_shown(how: str) -> None:
    runner = FakeRunner(64)
    engine = fake_engine(runner=runner)
    for name in "ab":
        engine.add(request(name, prompt(20), 8, logprobs=0, stop=("no such text",)), stream=True)
    for _ in range(4):
        engine.step()
    runner.bad_rows.add("a")
    engine.step()
    ended: list[Completion] = []
    if how == "abort":
        engine.abort("b")
    elif how == "failure":
        runner.bad_rows.add("b")
    else:
        ended += engine.fail_all("gone")
    while engine.has_work:
        ended += engine.step()
    (completion,) = (one for one in ended if one.request_id == "b")
    deltas = [delta for delta in engine.take_deltas() if delta.request_id == "b"]
    shown = [token for delta in deltas for token in delta.token_ids]
    assert shown == list(completion.token_ids) == answer(request("b", prompt(20)), 4)
    assert "".join(delta.text for delta in deltas) == completion.text
    assert completion.logprobs is not None and len(completion.logprobs) == 4


class FailingOnce(FakeTokenizer):
    """Its n-th decode raises."""

    calls = 0
    failing = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.calls += 1
        if self.calls == self.failing:
            raise ValueError("not this time")
        return super().decode(token_ids)


@pytest.mark.parametrize("failing", "abc")
def test_a_stream_that_cannot_be_decoded_ends_alone_and_costs_nobody_a_token(failing: str) -> None:
    tokenizer = FailingOnce()
    runner = FakeRunner(64)
    engine = fake_engine(runner=runner, tokenizer=tokenizer)
    engine.add(request("silent", prompt(20), 8))
    for name in "abc":
        engine.add(request(name, prompt(20), 8), stream=True)
    engine.step()
    engine.step()
    tokenizer.failing = tokenizer.calls + 1 + "abc".index(failing)
    done = finish(engine)
    deltas = engine.take_deltas()
    for name in "abc":
        mine = [delta for delta in deltas if delta.request_id == name]
        assert [token for delta in mine for token in delta.token_ids] == list(done[name].token_ids)
        assert "".join(delta.text for delta in mine) == done[name].text
    assert done.pop(failing).error_code == "engine_error"
    assert {len(completion.token_ids) for completion in done.values()} == {8}
    assert sum(runner.computed.values()) == 20 + 7, "Nobody had to run again."


def test_a_failed_engine_fails_every_rider() -> None:
    engine = fake_engine()
    for name in "abc":
        engine.add(request(name, prompt(20)))
    engine.step()
    assert {c.request_id: c.error_code for c in engine.fail_all("gone")} == dict.fromkeys(
        "abc", "engine_error"
    )
    assert not engine.has_work


def test_a_rider_in_a_hurry_takes_the_row_along() -> None:
    engine = fake_engine(max_num_seqs=1)
    engine.add(request("running", prompt(8, 9), 4))
    engine.step()
    engine.add(request("slow", prompt(8), 4))
    engine.add(request("between", prompt(8, 3), 4, priority=1))
    engine.add(request("fast", prompt(8), 4, priority=2))
    order = []
    while engine.has_work:
        order += [completion.request_id for completion in engine.step()]
        check(engine)
    assert order == ["running", "slow", "fast", "between"]


def test_a_parked_row_can_be_hurried_too() -> None:
    runner = FakeRunner(256)
    engine = fake_engine(num_blocks=256, max_num_tokens=100, runner=runner)
    engine.add(request("leader", [*prompt(160), *prompt(15, 3)]))
    engine.step()
    parked = request("parked", [*prompt(160), 5])
    engine.add(parked)
    engine.step()
    engine.add(replace(parked, request_id="hurried", priority=3))
    check(engine)
    done = finish(engine)
    assert list(done["parked"].token_ids) == list(done["hurried"].token_ids) == answer(parked, 8)


def test_a_batch_says_whom_it_computes_for() -> None:
    engine = fake_engine()
    seen: list[list[str]] = []
    engine.before_step = lambda batch: seen.append(engine.request_ids(batch))
    run_all(engine, [request("a", prompt(4), 1), request("b", prompt(4, 2), 1), request("c", prompt(4), 1)])
    assert sorted(seen[0]) == ["a", "b", "c"]
