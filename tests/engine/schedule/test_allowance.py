"""Tokens of a step after one was too large."""

from __future__ import annotations

from pagemill.engine.schedule.allowance import PATIENCE, TokenAllowance


def test_half_of_what_failed_is_tried_and_one_always() -> None:
    allowance = TokenAllowance(100)
    allowance.failed(40)
    assert allowance.tokens == 20
    for _ in range(9):
        allowance.failed(allowance.tokens)
    assert allowance.tokens == 1


def test_it_grows_back_after_steps_that_went_well() -> None:
    allowance = TokenAllowance(80)
    allowance.failed(80)
    for _ in range(PATIENCE - 1):
        allowance.went_well()
    assert allowance.tokens == 40
    allowance.went_well()
    assert allowance.tokens == 50
    for _ in range(9 * PATIENCE):
        allowance.went_well()
    assert allowance.tokens == 80
