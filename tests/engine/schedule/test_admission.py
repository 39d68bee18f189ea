"""How many rows are let in: by what rows have turned out to produce, not by what they might."""

from __future__ import annotations

import random

import pytest
from engine_fakes import EOS, FakeRunner, fake_engine, prompt, request, run_all

from pagemill.engine.schedule.admission import Admission, Lengths, OutputLength
from pagemill.engine.sequence import Sequence


def row(max_tokens: int, produced: int = 0, *, group: str = "", ignore_eos: bool = False) -> Sequence:
    asked = request("r", prompt(16), max_tokens, group=group, ignore_eos=ignore_eos)
    seq = Sequence.of(asked, arrival=0)
    seq.token_ids += [1] * produced
    return seq


def test_rows_that_still_run_make_the_expected_length_longer() -> None:
    length = OutputLength()
    for _ in range(100):
        length.produced(10)
        length.ended()
    alone = length.expected
    length.produced(5_000)  # by rows that have not ended
    assert length.expected > alone + 40


@pytest.mark.parametrize("mean", [20, 200])
def test_the_expected_length_is_learned_although_limits_cut_rows(mean: int) -> None:
    """Rows end at random; a third of them are cut by their limit before. The estimate is near the truth."""
    length, dice = OutputLength(), random.Random(0)
    for _ in range(3000):
        produced = int(dice.expovariate(1 / mean)) + 1
        cut = min(produced, mean)
        length.produced(cut)
        if cut == produced:
            length.ended()
    assert length.expected == pytest.approx(mean, rel=0.15)


def test_a_row_never_wants_more_than_its_limits() -> None:
    admission = Admission(max_tokens_per_row=10_000)
    for wanted, left in (
        (admission.growth(row(max_tokens=8)), 8),
        (admission.growth(row(max_tokens=8, produced=6)), 2),
        (Admission(max_tokens_per_row=20).growth(row(max_tokens=100)), 4),
    ):
        # A little less than all of it, as the row may end before.
        assert 0.97 * left < wanted * 16 / admission.caution < left
    row_without_end = row(max_tokens=1000, ignore_eos=True)
    assert admission.growth(row_without_end) == admission.caution * 1000 / 16
    assert Admission(10_000, learned=False).growth(row(max_tokens=1000)) == 1000 / 16


def test_a_preemption_makes_it_careful_and_quiet_steps_dare_again() -> None:
    admission = Admission(max_tokens_per_row=10_000)
    start = admission.caution
    admission.preempted()
    careful = admission.caution
    assert careful > start
    for _ in range(10_000):
        admission.step()
    assert admission.caution < start
    for _ in range(100):
        admission.preempted()
    assert admission.caution < 2


def test_max_tokens_are_not_reserved() -> None:
    """Rows that may produce 1,000 tokens and produce four: memory for one in full runs many at once."""
    runner = FakeRunner(70, next=lambda ids, _seed: EOS if len(ids) == 20 + 4 else 5)
    engine = fake_engine(num_blocks=70, max_num_seqs=64, max_num_tokens=512, runner=runner)
    run_all(engine, [request(f"r{n}", prompt(20, n), 1000) for n in range(300)])
    widest = max(len(batch.sequences) for batch in runner.batches)
    assert widest >= 20
    assert engine.metrics().preemptions == 0


def test_lengths_are_learned_and_preemptions_become_rare() -> None:
    """Rows of 100 to 200 tokens in memory for a dozen of them."""
    lengths = {f"r{n}": 100 + n * 37 % 100 for n in range(200)}
    runner = FakeRunner(150, keep_batches=False)
    engine = fake_engine(num_blocks=150, max_num_seqs=64, max_num_tokens=512, runner=runner)
    rows = [request(name, prompt(20, n), length) for n, (name, length) in enumerate(lengths.items())]
    run_all(engine, rows)
    assert engine.metrics().preemptions < 100
    # What was computed twice stays a small part of all that was.
    wanted = sum(20 + length - 1 for length in lengths.values())
    assert sum(runner.computed.values()) < 1.15 * wanted


def taught(lengths: Lengths, group: str, answers: int, tokens: int) -> None:
    seq = row(max_tokens=1000, group=group)
    for _ in range(answers):
        for _ in range(tokens):
            lengths.produced(seq)
        lengths.ended(seq)


def test_each_group_has_a_length_of_its_own() -> None:
    lengths = Lengths()
    taught(lengths, "short", 300, 4)
    taught(lengths, "long", 300, 60)
    assert lengths.of("short").expected == pytest.approx(4, rel=0.3)
    assert lengths.of("long").expected == pytest.approx(60, rel=0.1)


def test_a_new_group_begins_with_what_the_others_taught() -> None:
    lengths = Lengths()
    taught(lengths, "short", 500, 4)
    assert lengths.of("new").expected == pytest.approx(4, rel=0.5)
    taught(lengths, "new", 20, 50)
    assert lengths.of("new").expected > 40, "A few rows of its own count for more."


def test_groups_that_are_not_seen_any_more_are_forgotten() -> None:
    lengths = Lengths()
    taught(lengths, "old", 5, 3)
    for n in range(10_000):
        taught(lengths, f"g{n}", 1, 1)
        lengths.of("kept")
    assert len(lengths._groups) == 256
    assert "kept" in lengths._groups and "old" not in lengths._groups


def test_rows_that_can_only_be_cut_teach_nothing() -> None:
    lengths = Lengths()
    before = lengths.of("g").expected
    for _ in range(1000):
        lengths.produced(row(max_tokens=1000, group="g", ignore_eos=True))
    assert lengths.of("g").expected == before


def test_a_row_that_may_be_cut_is_expected_to_end_before() -> None:
    """The mean of an answer of chance length that is cut at a limit, drawn a few thousand times."""
    dice, length = random.Random(1), OutputLength(prior=50.0)
    for limit in (5, 50, 500):
        drawn = [min(dice.expovariate(1 / 50), limit) for _ in range(20_000)]
        assert length.within(limit) == pytest.approx(sum(drawn) / len(drawn), rel=0.03)
