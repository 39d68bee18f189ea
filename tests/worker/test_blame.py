"""Finding the row that kills engines, among others that must not pay for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagemill.worker.blame import DEATHS_ALONE, Quarantine


def run_to_the_end(rows: list[str], poison: set[str], step: int) -> tuple[set[str], set[str], int]:
    """Plays an engine that dies of poison rows in its step of `step` rows: done, poisoned, deaths."""
    quarantine, left = Quarantine(), list(rows)
    done: set[str] = set()
    poisoned: set[str] = set()
    deaths = 0
    while left:
        assert deaths < 1000, "it goes on for ever"
        running = [rid for rid in left if not quarantine.holds(rid)][:step]
        if quarantine.wants_canary:
            assert not running, "nothing runs beside the canary"
            quarantine.vouch()
            continue
        assert running, "nothing may run and nothing is done"
        if poison & set(running):
            deaths += 1
            for rid in quarantine.crashed(set(running)):
                poisoned.add(rid)
                left.remove(rid)
            continue
        for rid in running:
            quarantine.done(rid)
            left.remove(rid)
            done.add(rid)
    assert quarantine.group is None
    return done, poisoned, deaths


def test_one_poison_row_among_64_costs_about_log2_restarts() -> None:
    rows = [f"r{i:02d}" for i in range(64)]
    done, poisoned, deaths = run_to_the_end(rows, {"r37"}, 64)
    assert poisoned == {"r37"}
    assert done == set(rows) - {"r37"}
    assert deaths <= 6 + 1 + DEATHS_ALONE


@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=4), st.integers(1, 16))
def test_exactly_the_poison_rows_are_found(count: int, bad: set[int], step: int) -> None:
    rows = [f"r{i:02d}" for i in range(count)]
    poison = {rows[i] for i in bad if i < count}
    done, poisoned, _ = run_to_the_end(rows, poison, step)
    assert poisoned == poison
    assert done == set(rows) - poison


def test_a_death_from_outside_costs_the_step_one_more_run_and_no_blame() -> None:
    quarantine = Quarantine()
    assert quarantine.crashed({"a", "b", "c"}) == []
    assert quarantine.group == ["a", "b", "c"]
    assert quarantine.holds("d")
    assert [quarantine.done(rid) for rid in ("a", "b", "c")] == [False, False, True]
    assert quarantine.group is None
    assert not quarantine.holds("d")


def test_a_death_without_suspects_blames_nobody() -> None:
    quarantine = Quarantine()
    assert quarantine.crashed(set()) == []
    assert quarantine.group is None
    quarantine.crashed({"a"})
    for _ in range(5):
        assert quarantine.crashed(set()) == []
    assert quarantine.group == ["a"]
    assert not quarantine.wants_canary


def test_the_second_death_alone_counts_only_after_a_canary() -> None:
    quarantine = Quarantine()
    quarantine.crashed({"a"})
    assert quarantine.crashed({"a"}) == []
    assert quarantine.wants_canary
    assert quarantine.holds("a")
    quarantine.vouch()
    assert not quarantine.holds("a")
    assert quarantine.holds("b")
    assert quarantine.crashed({"a"}) == ["a"]
    assert not quarantine.holds("b")


def test_a_death_of_the_canary_asks_for_another() -> None:
    quarantine = Quarantine()
    quarantine.crashed({"a"})
    quarantine.crashed({"a"})
    assert quarantine.crashed(set()) == []
    assert quarantine.wants_canary
    assert quarantine.holds("a")


def test_a_row_that_had_not_entered_the_fatal_step_is_cleared() -> None:
    quarantine = Quarantine()
    quarantine.crashed({"a", "b", "c", "d"})
    quarantine.crashed({"a", "b"})
    assert quarantine.group == ["a"]
    assert quarantine.holds("c"), "it waits, but is no suspect"
    quarantine.done("a")
    quarantine.done("b")
    assert quarantine.group is None
    assert not quarantine.holds("c")


def test_an_aborted_suspect_makes_room_for_the_others() -> None:
    quarantine = Quarantine()
    quarantine.crashed({"a", "b"})
    quarantine.crashed({"a", "b"})
    assert quarantine.group == ["a"]
    assert quarantine.done("b") is True
    assert quarantine.done("a") is True
    assert quarantine.group is None
