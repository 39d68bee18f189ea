"""How many rows are let in: by what rows have turned out to produce, not by what they might."""

from __future__ import annotations

import random

import pytest
from engine_fakes import EOS, FakeRunner, fake_engine, prompt, request, run_all

from pagemill.engine.schedule.admission import Admission, OutputLength
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
