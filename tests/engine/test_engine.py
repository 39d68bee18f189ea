"""The step loop over a checkable model: what comes out, for every way of scheduling it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from engine_fakes import (
    EOS,
    FakeRunner,
    FakeTokenizer,
    answer,
    check,
    fake_engine,
    next_token,
    prompt,
    request,
    run_all,
)

BLOCK = 16


def test_a_row_gets_its_tokens_and_its_numbers() -> None:
    engine = fake_engine()
    one = request("a", prompt(20), 5)
    completion = run_all(engine, [one])["a"]
    assert list(completion.token_ids) == answer(one, 5)
    assert completion.text == FakeTokenizer().decode(answer(one, 5))
    assert completion.finish_reason == "length"
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (20, 5)
    timings = completion.timings
    assert timings.first_token is not None and timings.finished is not None
    assert timings.queued < timings.first_token < timings.finished


@pytest.mark.parametrize("budget", [1, 2, 15, 16, 17, 1000])
@pytest.mark.parametrize("cache", [True, False])
def test_tokens_do_not_depend_on_the_token_budget(budget: int, cache: bool) -> None:
    rows = [request(f"r{n}", prompt(n), 6, seed=n) for n in (1, 15, 16, 17, 31, 32, 33, 100)]
    engine = fake_engine(max_num_tokens=budget, prefix_cache=cache)
    done = run_all(engine, rows)
    for row in rows:
        assert list(done[row.request_id].token_ids) == answer(row, 6), row.request_id


def test_the_budget_is_never_exceeded() -> None:
    runner = FakeRunner(64)
    engine = fake_engine(max_num_tokens=24, runner=runner)
    run_all(engine, [request(f"r{n}", prompt(40, n), 10) for n in range(8)])
    assert max(batch.num_tokens for batch in runner.batches) == 24
    assert any({1} < set(batch.num_scheduled) for batch in runner.batches), (
        "No step mixed decodes with prefill chunks."
    )


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1])
def test_a_full_prefix_hit_still_computes_the_last_token(length: int) -> None:
    runner = FakeRunner(64)
    engine = fake_engine(runner=runner)
    first, second = request("a", prompt(length)), request("b", prompt(length))
    before = run_all(engine, [first])["a"]
    after = run_all(engine, [second])["b"]
    assert before.token_ids == after.token_ids
    assert after.usage.cached_tokens == (length - 1) // BLOCK * BLOCK
    assert runner.computed["b"] == runner.computed["a"] - after.usage.cached_tokens


def test_without_the_prefix_cache_nothing_is_shared() -> None:
    engine = fake_engine(prefix_cache=False)
    run_all(engine, [request("a", prompt(64))])
    assert run_all(engine, [request("b", prompt(64))])["b"].usage.cached_tokens == 0


def test_another_salt_shares_nothing() -> None:
    engine = fake_engine()
    run_all(engine, [request("a", prompt(64), salt="one")])
    assert run_all(engine, [request("b", prompt(64), salt="two")])["b"].usage.cached_tokens == 0
    assert run_all(engine, [request("c", prompt(64), salt="one")])["c"].usage.cached_tokens == 48


def test_rows_admitted_together_prefill_a_common_prefix_once() -> None:
    runner = FakeRunner(256)
    engine = fake_engine(num_blocks=256, max_num_tokens=64, runner=runner)
    common = prompt(160)
    rows = [request(f"r{n}", [*common, *prompt(10, n + 1)], 4) for n in range(12)]
    done = run_all(engine, rows)
    computed = sum(runner.computed.values())
    once = 160 + 12 * (10 + 4 - 1)
    assert computed == once
    assert sum(c.usage.cached_tokens for c in done.values()) == 11 * 160


def test_rows_that_wait_for_a_prefix_do_not_hold_up_others() -> None:
    runner = FakeRunner(256)
    engine = fake_engine(num_blocks=256, max_num_tokens=100, runner=runner)
    engine.add(request("leader", [*prompt(160), *prompt(15, 3)]))
    engine.add(request("follower", [*prompt(160), 5]))
    engine.add(request("other", prompt(8, 9)))
    engine.step()
    engine.step()
    assert {seq.request.request_id for seq in runner.batches[1].sequences} == {"leader", "other"}
    check(engine)


@pytest.mark.parametrize("how", ["abort", "nan"])
def test_rows_that_wait_for_a_prefix_go_on_when_its_row_ends(how: str) -> None:
    runner = FakeRunner(256)
    engine = fake_engine(num_blocks=256, max_num_tokens=32, runner=runner)
    follower = request("follower", [*prompt(160), 5])
    engine.add(request("leader", prompt(160)))
    engine.add(follower)
    engine.step()
    check(engine)
    if how == "abort":
        engine.abort("leader")
    else:
        runner.bad_rows.add("leader")
    done = run_all(engine, [])
    assert done["leader"].finish_reason == ("abort" if how == "abort" else "error")
    assert list(done["follower"].token_ids) == answer(follower, 8)


def test_a_short_pool_preempts_and_changes_no_token() -> None:
    rows = [request(f"r{n}", prompt(20 + n, n), 60) for n in range(8)]
    engine = fake_engine(num_blocks=12, max_num_seqs=8)
    done = run_all(engine, rows)
    assert engine.metrics().preemptions > 0
    for row in rows:
        assert list(done[row.request_id].token_ids) == answer(row, 60)


def test_the_oldest_row_is_never_preempted() -> None:
    runner = FakeRunner(10)
    engine = fake_engine(num_blocks=10, max_num_seqs=8, runner=runner)
    run_all(engine, [request(f"r{n}", prompt(20, n), 70) for n in range(6)])
    rows = {seq.arrival: seq for batch in runner.batches for seq in batch.sequences}
    assert rows[0].num_preemptions == 0
    assert sum(seq.num_preemptions for seq in rows.values()) > 0


def test_a_step_that_preempts_admits_nobody() -> None:
    runner = FakeRunner(10)
    engine = fake_engine(num_blocks=10, max_num_seqs=8, runner=runner)
    for n in range(8):
        engine.add(request(f"r{n}", prompt(20, n), 70))
    seen: set[str] = set()
    while engine.has_work:
        before = engine.metrics().preemptions
        engine.step()
        names = {seq.request.request_id for seq in runner.batches[-1].sequences}
        if engine.metrics().preemptions > before:
            assert names <= seen, "A row entered in a step that threw another out."
        seen |= names


def test_a_prompt_over_the_whole_pool_is_refused_with_both_numbers() -> None:
    engine = fake_engine(num_blocks=8)
    other = request("b", prompt(30))
    done = run_all(engine, [request("a", prompt(9 * BLOCK)), other])
    assert done["a"].finish_reason == "error"
    assert done["a"].error_code == "prompt_too_long"
    assert "144" in (done["a"].error_message or "") and "128" in (done["a"].error_message or "")
    assert list(done["b"].token_ids) == answer(other, 8)


@pytest.mark.parametrize("length", [7 * BLOCK, 8 * BLOCK - 1, 8 * BLOCK])
def test_a_row_that_fills_the_pool_alone_ends_as_length(length: int) -> None:
    engine = fake_engine(num_blocks=8)
    row, other = request("a", prompt(length), 1000), request("b", prompt(30, 2), 8)
    done = run_all(engine, [row, other])
    assert done["a"].finish_reason == "length"
    # The last token needs no memory: nothing is computed after it.
    assert list(done["a"].token_ids) == answer(row, 8 * BLOCK + 1 - length)
    assert list(done["b"].token_ids) == answer(other, 8)


def test_a_row_ends_at_the_context() -> None:
    engine = fake_engine(context=40)
    done = run_all(
        engine, [request("a", prompt(30), 1000), request("b", prompt(39), 5), request("c", prompt(40))]
    )
    assert (done["a"].finish_reason, done["a"].usage.completion_tokens) == ("length", 10)
    assert (done["b"].finish_reason, done["b"].usage.completion_tokens) == ("length", 1)
    assert done["c"].error_code == "prompt_too_long"
    assert "40" in (done["c"].error_message or "") and "39" in (done["c"].error_message or "")


def test_a_row_without_finite_logits_ends_alone() -> None:
    runner = FakeRunner(64, bad_rows={"bad"})
    engine = fake_engine(runner=runner)
    rows = [request(name, prompt(40), 8, seed=n) for n, name in enumerate(("a", "bad", "c"))]
    done = run_all(engine, rows)
    assert done["bad"].error_code == "numeric_error"
    for row in (rows[0], rows[2]):
        assert list(done[row.request_id].token_ids) == answer(row, 8)


def test_what_a_broken_row_computed_is_never_a_hit() -> None:
    runner = FakeRunner(64, bad_rows={"bad"})
    engine = fake_engine(runner=runner)
    run_all(engine, [request("bad", prompt(64))])
    assert run_all(engine, [request("good", prompt(64))])["good"].usage.cached_tokens == 0


def test_rows_are_aborted_waiting_or_running() -> None:
    engine = fake_engine(max_num_seqs=1)
    engine.add(request("running", prompt(20), 50))
    engine.add(request("waiting", prompt(20, 2), 50))
    engine.step()
    engine.step()
    assert engine.abort("running") and engine.abort("waiting")
    assert not engine.abort("running")
    done = {completion.request_id: completion for completion in engine.step()}
    assert done["running"].finish_reason == done["waiting"].finish_reason == "abort"
    assert done["running"].usage.completion_tokens == 2
    assert done["waiting"].token_ids == ()
    assert not engine.has_work
    check(engine)
    assert engine.scheduler.pool.num_used == 0


def test_an_id_can_be_used_again_only_when_its_row_has_ended() -> None:
    engine = fake_engine()
    engine.add(request("a", prompt(4), 1))
    with pytest.raises(ValueError, match="already in flight"):
        engine.add(request("a", prompt(4), 1))
    engine.step()
    engine.add(request("a", prompt(4), 1))


@pytest.mark.parametrize(
    "broken",
    [
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"top_p": 1.5},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"top_k": -1},
        {"temperature": -1.0},
        {"temperature": math.inf},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.nan},
        {"logit_bias": ((5000, 1.0),)},
        {"logit_bias": ((5, math.nan),)},
        {"stop": ("",)},
        {"logprobs": -1},
    ],
    ids=str,
)
def test_a_bad_parameter_is_an_error_of_its_row(broken: dict[str, object]) -> None:
    engine = fake_engine()
    done = run_all(
        engine, [request("bad", prompt(4), **{"max_tokens": 2, **broken}), request("good", prompt(4), 2)]
    )  # type: ignore[arg-type]
    assert done["bad"].error_code == "invalid_request"
    assert next(iter(broken)) in (done["bad"].error_message or "").replace("stop string", "stop")
    assert done["good"].finish_reason == "length"


def test_min_tokens_with_every_token_held_back_is_an_error_of_its_row() -> None:
    every = tuple(range(1000))
    rows = {
        "bad": {"min_tokens": 1, "stop_token_ids": every[1:]},  # the model's own end is the one left
        "all": {"min_tokens": 2, "stop_token_ids": every},
        "none": {"min_tokens": 0, "stop_token_ids": every},
        "one": {"min_tokens": 1, "stop_token_ids": every[:-1]},
    }
    done = run_all(fake_engine(), [request(name, prompt(4), 3, **more) for name, more in rows.items()])  # type: ignore[arg-type]
    for name in ("bad", "all"):
        assert done[name].error_code == "invalid_request"
        assert "forbids every token of the vocabulary" in (done[name].error_message or "")
    assert (done["none"].finish_reason, len(done["none"].token_ids)) == ("stop", 1)
    assert done["one"].error_code is None


@pytest.mark.parametrize("bad_prompt", [[], [-1], [5000]])
def test_a_prompt_that_is_none_is_an_error_of_its_row(bad_prompt: list[int]) -> None:
    done = run_all(fake_engine(), [request("bad", bad_prompt)])["bad"]
    assert done.error_code == "invalid_request"
    assert all(str(token) in (done.error_message or "") for token in bad_prompt)


GOOD = request("good", prompt(30, 3), 4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        {"cache_salt": "\ud800"},
        {"group": None},
        {"prompt_token_ids": prompt(40)},
        {"prompt_token_ids": None},
        {"prompt_token_ids": (1, 2.5)},
        {"prompt_token_ids": (1, True)},
        {"seed": "1"},
        {"priority": None},
        {"sampling": None},
        {"sampling": replace(GOOD.sampling, stop=["x"])},  # type: ignore[arg-type]
        {"sampling": replace(GOOD.sampling, stop=(3,))},  # type: ignore[arg-type]
        {"sampling": replace(GOOD.sampling, stop_token_ids=[3])},  # type: ignore[arg-type]
        {"sampling": replace(GOOD.sampling, logit_bias=((3,),))},  # type: ignore[arg-type]
        {"sampling": replace(GOOD.sampling, logit_bias=((3, 1e39),))},
        {"sampling": replace(GOOD.sampling, max_tokens="4")},  # type: ignore[arg-type]
        {"sampling": replace(GOOD.sampling, logprobs=1.5)},  # type: ignore[arg-type]
        {"sampling": replace(GOOD.sampling, ignore_eos=[])},  # type: ignore[arg-type]
        {"sampling": replace(GOOD.sampling, top_k=2**31)},
        {"sampling": replace(GOOD.sampling, temperature=10**400)},
        {"sampling": replace(GOOD.sampling, presence_penalty=1e300)},
    ],
    ids=str,
)
def test_a_request_of_wrong_types_is_an_error_of_its_row(
    wrong: dict[str, Any], share: bool, stream: bool
) -> None:
    engine = fake_engine(identical_rows=share)
    engine.add(GOOD)
    engine.add(replace(GOOD, request_id="bad", **wrong), stream=stream)
    done = run_all(engine, [])
    assert done["bad"].error_code == "invalid_request"
    assert list(done["good"].token_ids) == answer(GOOD, 4)
    assert [delta.completion for delta in engine.take_deltas()] == [done["bad"]] * stream


def scripted(tokens: list[int], length: int) -> FakeRunner:
    """A model that answers a prompt of `length` tokens with this list."""
    return FakeRunner(64, next=lambda ids, _seed: tokens[len(ids) - length])


def test_eos_ends_a_row_and_is_not_text() -> None:
    engine = fake_engine(runner=scripted([5, 6, EOS, 7], 3))
    completion = run_all(engine, [request("a", prompt(3))])["a"]
    assert completion.finish_reason == "stop" and completion.stop_reason is None
    assert completion.token_ids == (5, 6, EOS)
    assert completion.text == "<5> <6> "


def test_ignore_eos_goes_on() -> None:
    engine = fake_engine(runner=scripted([5, EOS, 7, 8], 3))
    completion = run_all(engine, [request("a", prompt(3), 4, ignore_eos=True)])["a"]
    assert completion.token_ids == (5, EOS, 7, 8) and completion.finish_reason == "length"


def test_a_stop_token_ends_a_row_even_where_eos_is_ignored() -> None:
    engine = fake_engine(runner=scripted([5, EOS, 7, 8], 3))
    row = request("a", prompt(3), 4, ignore_eos=True, stop_token_ids=(7,))
    completion = run_all(engine, [row])["a"]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 7)
    assert completion.token_ids == (5, EOS, 7) and completion.text == "<5> "


def test_stops_are_honoured_from_min_tokens_on() -> None:
    engine = fake_engine(runner=scripted([EOS, 7, 5, 7, 9], 3))
    row = request("a", prompt(3), 5, min_tokens=3, stop_token_ids=(7,), stop=("<7>",))
    completion = run_all(engine, [row])["a"]
    assert completion.token_ids == (EOS, 7, 5, 7)


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    engine = fake_engine(runner=scripted([5, EOS], 3))
    assert run_all(engine, [request("a", prompt(3), 2)])["a"].finish_reason == "stop"


def test_logprobs_come_for_rows_that_asked() -> None:
    done = run_all(fake_engine(), [request("a", prompt(3), 3, logprobs=0), request("b", prompt(3), 3)])
    logprobs = done["a"].logprobs
    assert logprobs is not None and [one.token_id for one in logprobs] == list(done["a"].token_ids)
    assert done["b"].logprobs is None


def test_a_tokenizer_that_raises_costs_only_its_row() -> None:
    class Picky(FakeTokenizer):
        def decode(self, token_ids: object) -> str:
            if 666 in list(token_ids):  # type: ignore[call-overload]
                raise ValueError("no such token")
            return super().decode(token_ids)  # type: ignore[arg-type]

    def choose(ids: object, seed: int) -> int:
        return 666 if seed == 13 else 5

    engine = fake_engine(runner=FakeRunner(64, next=choose), tokenizer=Picky())  # type: ignore[arg-type]
    rows = [
        request("late", prompt(3), 2, seed=13),
        request("early", prompt(3), 2, seed=13, stop=("x",)),
        request("good", prompt(3), 2),
    ]
    done = run_all(engine, rows)
    assert done["late"].error_code == done["early"].error_code == "engine_error"
    assert "no such token" in (done["late"].error_message or "")
    assert done["good"].text == "<5> <5> "


def test_one_long_row_does_not_hold_up_short_ones() -> None:
    runner = FakeRunner(256)
    engine = fake_engine(num_blocks=256, max_num_seqs=8, runner=runner)
    engine.add(request("long", prompt(8), 400))
    for n in range(63):
        engine.add(request(f"s{n}", prompt(8, n + 2), 4))
    order = []
    while engine.has_work:
        order += [completion.request_id for completion in engine.step()]
    assert order[-1] == "long"
    # 63 rows of 4 tokens through 7 places: 9 rounds, and the places are refilled at once.
    last = max(i for i, batch in enumerate(runner.batches) if len(batch.sequences) > 1)
    assert last <= 9 * 5


def test_higher_priority_goes_first() -> None:
    engine = fake_engine(max_num_seqs=1)
    order: list[str] = []
    for n, priority in enumerate([0, 5, -3, 5]):
        engine.add(request(f"p{priority}-{n}", prompt(4, n + 1), 2, priority=priority))
    while engine.has_work:
        order += [completion.request_id for completion in engine.step()]
    assert order == ["p5-1", "p5-3", "p0-0", "p-3-2"]


def test_before_step_sees_each_batch_before_it_runs() -> None:
    runner = FakeRunner(64)
    engine = fake_engine(runner=runner)
    seen: list[int] = []
    engine.before_step = lambda batch: seen.append(len(runner.batches))
    run_all(engine, [request("a", prompt(4), 3)])
    assert seen == [0, 1, 2]


def test_deltas_are_the_completion_in_pieces() -> None:
    engine = fake_engine()
    engine.add(request("a", prompt(4), 5), stream=True)
    engine.add(request("b", prompt(4), 5))
    deltas, done = [], {}
    while engine.has_work:
        done.update({completion.request_id: completion for completion in engine.step()})
        deltas += engine.take_deltas()
    assert {delta.request_id for delta in deltas} == {"a"}
    assert "".join(delta.text for delta in deltas) == done["a"].text
    assert [token for delta in deltas for token in delta.token_ids] == list(done["a"].token_ids)
    assert [delta.completion for delta in deltas] == [None] * 4 + [done["a"]]


def test_fail_all_ends_every_row() -> None:
    engine = fake_engine(max_num_seqs=1)
    for name in ("a", "b"):
        engine.add(request(name, prompt(4)))
    engine.step()
    done = engine.fail_all("the device is gone")
    assert {c.request_id: c.error_code for c in done} == {"a": "engine_error", "b": "engine_error"}
    assert done[0].error_message == "the device is gone"
    assert not engine.has_work


def test_metrics_add_up() -> None:
    engine = fake_engine()
    run_all(engine, [request("a", prompt(40), 4)])
    run_all(engine, [request("b", prompt(40), 4)])
    metrics = engine.metrics()
    assert metrics.generated_tokens == 8
    assert metrics.prefilled_tokens == 40 + 8
    assert (metrics.prompt_tokens, metrics.cached_tokens) == (80, 32)
    assert metrics.hit_rate == 0.4
    assert metrics.finished == 2 and metrics.running == metrics.waiting == 0
    assert metrics.blocks_used == 0 and metrics.blocks_total == 64
    assert metrics.steps == 8
    assert metrics.tokens_per_second > 0 and 0 < metrics.batch_fill < 1


def test_the_fake_models_answers_are_what_they_are_checked_against() -> None:
    row = request("a", prompt(4), 2)
    first = next_token(prompt(4))
    assert answer(row, 2) == [first, next_token([*prompt(4), first])]
