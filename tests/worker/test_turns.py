"""Whose turn the engine is: nobody waits for ever, and nothing changes without a reason."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.jobs.status import Want
from pagemill.worker.turns import HELP_S, LOADS_IN_A_SLICE, SPREAD_S, Turns

NOTHING, WORK = Want(), Want(jobs=3, unserved=0)
ALONE = Want(jobs=1, unserved=1)  # others could load it
OURS = Want(jobs=1, unserved=1, alone=1)
SHARED = Want(jobs=1, loaded=1)  # another worker has it loaded


def turns(slice_s: float = 60.0, spread: float = 0.0) -> Turns:
    return Turns(slice_s, lambda: spread)


def test_a_model_with_work_keeps_the_engine_for_its_slice_and_no_longer() -> None:
    asked = turns()
    wants = {"a": WORK, "b": ALONE}
    for now in range(60):
        assert asked.next(now, wants, "a", 0.0, 1.0, True) is None
    assert asked.next(60, wants, "a", 0.0, 1.0, True) == "b"


def test_a_slice_is_several_loads_long() -> None:
    asked = turns(slice_s=1.0)
    wants = {"a": WORK, "b": ALONE}
    assert asked.next(LOADS_IN_A_SLICE * 30 - 1, wants, "a", 0.0, 30.0, True) is None
    assert asked.next(LOADS_IN_A_SLICE * 30, wants, "a", 0.0, 30.0, True) == "b"


def test_a_job_that_comes_after_the_slice_starts_at_once() -> None:
    assert turns().next(1000.0, {"a": WORK, "b": ALONE}, "a", 0.0, 1.0, True) == "b"


def test_what_others_serve_is_no_reason_to_leave_work() -> None:
    assert turns().next(1000.0, {"a": WORK, "b": WORK}, "a", 0.0, 1.0, True) is None


@pytest.mark.parametrize("busy", [True, False])
def test_shards_that_run_are_work_though_none_waits(busy: bool) -> None:
    assert turns().next(5.0, {"a": NOTHING, "b": ALONE}, "a", 0.0, 1.0, busy) == (None if busy else "b")


def test_an_idle_worker_helps_others_after_a_while() -> None:
    asked = turns()
    wants = {"a": NOTHING, "b": WORK}
    assert asked.next(0.0, wants, "a", 0.0, 1.0, False) is None
    assert asked.next(HELP_S - 1, wants, "a", 0.0, 1.0, False) is None
    assert asked.next(HELP_S, wants, "a", 0.0, 1.0, False) == "b"


def test_workers_that_see_the_same_job_do_not_all_run_for_it() -> None:
    """The first one that loads makes it a served one for those who hesitate."""
    slow = turns(spread=1.0)
    assert slow.next(0.0, {"a": NOTHING, "b": ALONE}, "a", 0.0, 1.0, False) is None
    assert slow.next(1.0, {"a": NOTHING, "b": NOTHING}, "a", 0.0, 1.0, False) is None
    assert slow.next(SPREAD_S, {"a": NOTHING, "b": ALONE}, "a", 0.0, 1.0, False) is None


def test_of_two_that_wait_an_idle_worker_takes_the_higher_priority() -> None:
    wants = {"a": NOTHING, "b": ALONE, "c": Want(jobs=1, unserved=1, priority=5)}
    assert turns().next(0.0, wants, "a", 0.0, 1.0, False) == "c"


def test_an_idle_worker_prefers_what_it_alone_may_serve() -> None:
    wants = {"a": NOTHING, "b": Want(jobs=1, unserved=1, priority=5), "c": OURS}
    assert turns().next(0.0, wants, "a", 0.0, 1.0, False) == "c"


@pytest.mark.parametrize("busy", [True, False])
def test_work_that_others_do_too_is_left_at_once_for_what_nobody_else_may_serve(busy: bool) -> None:
    """Two workers have `a`, only this one may load `b`: not a slice of waiting beside an idle worker."""
    assert turns().next(1.0, {"a": SHARED, "b": OURS}, "a", 0.0, 1.0, busy) == "b"


@pytest.mark.parametrize(
    ("a", "b"),
    [(WORK, OURS), (SHARED, ALONE), (SHARED, Want(jobs=1, loaded=1))],
    ids=["a is done here alone", "b may be loaded elsewhere", "b is served"],
)
def test_otherwise_the_slice_goes_on(a: Want, b: Want) -> None:
    assert turns().next(1.0, {"a": a, "b": b}, "a", 0.0, 1.0, True) is None


def test_without_anybody_waiting_the_model_stays() -> None:
    assert turns().next(1e6, {"a": NOTHING, "b": NOTHING}, "a", 0.0, 1.0, False) is None


def test_a_model_that_left_the_list_is_forgotten() -> None:
    asked = turns()
    asked.next(0.0, {"a": WORK, "b": ALONE}, "a", 0.0, 1.0, True)
    assert asked.next(100.0, {"a": WORK}, "a", 0.0, 1.0, True) is None


@given(
    models=st.integers(2, 5),
    slice_s=st.floats(1, 100),
    load_s=st.floats(0, 20),
    priorities=st.lists(st.integers(-5, 5), min_size=5, max_size=5),
)
def test_where_all_have_work_for_ever_each_gets_its_turn(
    models: int, slice_s: float, load_s: float, priorities: list[int]
) -> None:
    """Within a slice and a load of each other one, whatever the priorities."""
    names = [f"m{i}" for i in range(models)]
    asked = turns(slice_s)
    now, loaded, since = 0.0, names[0], 0.0
    order: list[str] = [loaded]
    for _ in range(int(models * 4 * (max(slice_s, LOADS_IN_A_SLICE * load_s) + load_s + 2))):
        wants = {name: Want(1, 0 if name == loaded else 1, priorities[i]) for i, name in enumerate(names)}
        following = asked.next(now, wants, loaded, since, load_s, True)
        if following is not None:
            loaded, since = following, now + load_s
            order.append(loaded)
            now = since
        now += 1.0
    for at in range(len(order) - models + 1):
        assert len(set(order[at : at + models])) == models, order
    assert len(Counter(order)) == models
