"""Who waits for whose prefix."""

from __future__ import annotations

import pytest
from engine_fakes import prompt, request

from pagemill.engine.cache.prefix import extend_hashes
from pagemill.engine.schedule.inflight import InFlight
from pagemill.engine.sequence import Sequence, Status


def row(ids: list[int], arrival: int = 0) -> Sequence:
    seq = Sequence.of(request(f"r{arrival}", ids), arrival)
    extend_hashes(seq, len(ids) // 16)
    return seq


def test_a_row_waits_for_the_last_block_that_somebody_computes() -> None:
    inflight = InFlight()
    leader, follower = row(prompt(64)), row([*prompt(48), *prompt(16, 5)], 1)
    inflight.begin(leader)
    assert inflight.awaited(follower, 0, 3) == leader.block_hashes[2]
    assert inflight.awaited(follower, 3, 3) is None
    inflight.park(follower, leader.block_hashes[2])
    inflight.check([leader])
    assert inflight.published(leader.block_hashes[:2]) == []
    assert inflight.published(leader.block_hashes[2:3]) == [follower]


def test_rows_go_on_when_the_row_they_wait_for_gives_up() -> None:
    inflight = InFlight()
    leader, follower = row(prompt(64)), row(prompt(64), 1)
    inflight.begin(leader)
    inflight.park(follower, leader.block_hashes[2])
    leader.num_computed_tokens = 16
    assert inflight.published(leader.block_hashes[:1]) == []
    assert inflight.give_up(leader) == [follower]
    inflight.check([])
    assert inflight.awaited(follower, 1, 3) is None


def test_the_first_to_compute_a_block_stays_responsible() -> None:
    inflight = InFlight()
    first, second = row(prompt(32)), row(prompt(32), 1)
    inflight.begin(first)
    inflight.begin(second)
    inflight.give_up(second)
    assert inflight.awaited(row(prompt(32), 2), 0, 1) == first.block_hashes[0]


def test_rows_that_have_ended_do_not_come_back() -> None:
    inflight = InFlight()
    leader, follower = row(prompt(32)), row(prompt(32), 1)
    inflight.begin(leader)
    inflight.park(follower, leader.block_hashes[0])
    follower.status = Status.FINISHED
    assert inflight.published(leader.block_hashes) == []


def test_what_a_row_has_already_is_nobodys_work() -> None:
    inflight = InFlight()
    leader = row(prompt(64))
    leader.num_computed_tokens = 32
    inflight.begin(leader)
    assert inflight.awaited(row(prompt(64), 1), 0, 3) is None
    assert inflight.awaited(row(prompt(64), 1), 2, 3) == leader.block_hashes[2]


def test_check_finds_a_row_that_nobody_will_wake() -> None:
    inflight = InFlight()
    inflight.park(row(prompt(32)), b"nobody")
    with pytest.raises(AssertionError, match="nobody computes"):
        inflight.check([])
