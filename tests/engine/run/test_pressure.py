"""Fewer rows while memory is short, all of them again when it is not, and nobody thrown out."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest
from engine_fakes import answer, check, fake_engine, prompt, request

from pagemill.engine.run.pressure import AMPLE_BYTES, LOOK_S, RESERVE_BYTES, Pressure

SHORT, BETWEEN, AMPLE = RESERVE_BYTES - 1, RESERVE_BYTES, AMPLE_BYTES + 1


@dataclass
class Machine:
    """Free memory that the test sets, and time that passes a look at each question."""

    free: int | None = AMPLE
    now: float = 0.0
    looks: list[float] = field(default_factory=list)

    def available(self) -> int | None:
        self.looks.append(self.now)
        return self.free

    def pressure(self, most: int) -> Pressure:
        return Pressure(most, available=self.available, clock=lambda: self.now)

    def rows(self, pressure: Pressure) -> int:
        self.now += LOOK_S
        return pressure.rows()


def test_the_limit_halves_to_one_and_grows_back_slowly() -> None:
    machine = Machine()
    pressure = machine.pressure(64)
    assert machine.rows(pressure) == 64
    machine.free = SHORT
    assert [machine.rows(pressure) for _ in range(8)] == [32, 16, 8, 4, 2, 1, 1, 1]
    machine.free = BETWEEN
    assert machine.rows(pressure) == 1
    machine.free = AMPLE
    grown = [machine.rows(pressure) for _ in range(60)]
    assert grown[:4] == [2, 3, 4, 5]
    assert grown == sorted(grown)
    assert grown[-1] == 64


def test_it_looks_once_a_second() -> None:
    machine = Machine(SHORT)
    pressure = machine.pressure(64)
    for _ in range(100):
        machine.now += LOOK_S / 10
        pressure.rows()
    assert 9 <= len(machine.looks) <= 11


def test_an_unknown_system_is_left_alone() -> None:
    machine = Machine(None)
    pressure = machine.pressure(7)
    assert [machine.rows(pressure) for _ in range(3)] == [7, 7, 7]


def test_it_says_when_memory_is_short_and_when_it_suffices(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(SHORT)
    pressure = machine.pressure(2)
    with caplog.at_level(logging.INFO):
        machine.rows(pressure)
        machine.rows(pressure)
        machine.free = AMPLE
        machine.rows(pressure)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "255 MiB are free" in caplog.text
    assert "at most 1 rows run at once, of 2" in caplog.text


def test_an_engine_lets_nobody_in_above_the_limit_and_throws_nobody_out() -> None:
    engine = fake_engine(max_num_seqs=8, max_num_tokens=512)
    limit = 8
    engine.rows_allowed = lambda: limit
    rows = [request(f"{n}", prompt(20, n), 12) for n in range(20)]
    for row in rows:
        engine.add(row)
    done = engine.step()
    assert engine.metrics().running == 8
    limit, running = 2, []
    while engine.has_work:
        ended = engine.step()
        done += ended
        running.append(engine.metrics().running)
        check(engine)
        if len(done) >= 12:
            limit = 8
    assert running[0] == 8  # those that ran go on
    assert 2 in running and max(running[running.index(2) :]) <= 8
    assert (engine.metrics().preemptions, engine.metrics().rows_allowed) == (0, 8)
    assert {c.request_id: list(c.token_ids) for c in done} == {r.request_id: answer(r, 12) for r in rows}
