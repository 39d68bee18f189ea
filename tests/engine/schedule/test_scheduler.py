"""Who computes what in a step, where memory is short: cases that random histories seldom reach."""

from __future__ import annotations

from engine_fakes import prompt, request

from pagemill.engine.batch import Batch
from pagemill.engine.config import SchedulerConfig
from pagemill.engine.schedule.scheduler import Scheduler
from pagemill.engine.sequence import Sequence, Status


class Steps:
    """A scheduler whose batches 'run': each row whose tokens are all computed gets one more.

    Rows come in order of arrival and are let in on what they hold, without a guess of what they may grow to.
    """

    def __init__(self, **limits: int) -> None:
        self.scheduler = Scheduler(SchedulerConfig(context=10_000, long_rows_first=False, **limits))
        self.scheduler.admission.growth = lambda seq: 0.0  # type: ignore[method-assign]
        self.rows: list[Sequence] = []

    def add(
        self, length: int, max_tokens: int = 100, first: int | None = None, priority: int = 0
    ) -> Sequence:
        ids = prompt(length, len(self.rows) if first is None else first)
        name = f"r{len(self.rows)}"
        seq = Sequence.of(request(name, ids, max_tokens, priority=priority), arrival=len(self.rows))
        self.rows.append(seq)
        self.scheduler.add(seq)
        return seq

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        self.scheduler.begun(batch)
        self.scheduler.advance(batch, [True] * len(batch.sequences))
        for seq in batch.sequences:
            if seq.num_uncomputed_tokens == 0:
                seq.token_ids.append(1)
        self.scheduler.check(seq for seq in self.rows if seq.status is not Status.FINISHED)
        return batch

    def end(self, seq: Sequence) -> None:
        seq.finish_reason = "stop"
        self.scheduler.remove(seq)


def planned(batch: Batch) -> dict[str, int]:
    return {seq.request.request_id: n for seq, n in zip(batch.sequences, batch.num_scheduled, strict=True)}


def test_decodes_come_before_chunks_and_running_rows_before_waiting_ones() -> None:
    steps = Steps(num_blocks=64, max_num_tokens=20)
    steps.add(4)
    steps.add(60)
    steps.add(18)
    assert planned(steps.step()) == {"r0": 4, "r1": 16}
    assert planned(steps.step()) == {"r0": 1, "r1": 19}
    assert planned(steps.step()) == {"r0": 1, "r1": 19}
    assert planned(steps.step()) == {"r0": 1, "r1": 6, "r2": 13}
    assert planned(steps.step()) == {"r0": 1, "r1": 1, "r2": 5}


def test_an_older_row_takes_back_what_a_younger_one_was_given_in_this_step() -> None:
    """The younger decodes, the older still reads its prompt: the budget given to the younger returns too."""
    steps = Steps(num_blocks=5, max_num_tokens=2)
    older, younger = steps.add(64), steps.add(1)
    batch = steps.step()
    while not younger.num_preemptions:
        batch = steps.step()
    assert planned(batch) == {"r0": 2}
    assert older.num_preemptions == 0
    assert younger.status is Status.WAITING and not younger.block_table


def test_the_latest_arrival_gives_way_although_it_is_not_the_last_admitted() -> None:
    steps = Steps(num_blocks=6, max_num_tokens=64)
    rows = [steps.add(16), steps.add(16), steps.add(16)]
    while not any(row.num_preemptions for row in rows):
        steps.step()
    assert [row.num_preemptions for row in rows] == [0, 0, 1]


def test_a_row_without_anybody_later_gives_way_itself() -> None:
    steps = Steps(num_blocks=3, max_num_tokens=64)
    older, younger = steps.add(20), steps.add(4)
    while not younger.num_preemptions:
        steps.step()
    # The younger needed a second block when none was left: it was its own turn to go.
    assert older.num_preemptions == 0 and len(younger.token_ids) == 17


def test_a_preempted_row_returns_only_with_a_block_to_spare_for_each_running_row() -> None:
    steps = Steps(num_blocks=6, max_num_tokens=64, prefix_cache=False)
    first, second, third = steps.add(16), steps.add(16), steps.add(16)
    steps.step()
    steps.scheduler._preempt(third)
    # Two rows hold two blocks each from now on; the third needs two of two, and a block for each of them.
    steps.step()
    assert third.status is Status.WAITING
    steps.end(second)
    steps.step()
    assert third.status is Status.RUNNING
    assert first.status is Status.RUNNING


def test_a_step_that_preempts_admits_nobody() -> None:
    """Not even a row of higher priority that would fit into what was freed."""
    steps = Steps(num_blocks=5, max_num_tokens=256)
    older, younger = steps.add(32), steps.add(48)
    steps.step()  # all five blocks are held, and each row now needs one more
    urgent = steps.add(1, max_tokens=1, priority=9)
    steps.step()
    assert younger.num_preemptions == 1 and older.status is Status.RUNNING
    assert urgent.status is Status.WAITING
    steps.step()
    assert urgent.status is Status.RUNNING


def test_a_preempted_row_waits_for_memory_only_and_for_nobodys_prefix() -> None:
    steps = Steps(num_blocks=64, max_num_tokens=256)
    row = steps.add(160, first=0)
    steps.step()
    steps.scheduler._preempt(row)
    steps.scheduler.pool.forget_all()
    twin = steps.add(160, first=0, priority=9)
    new = steps.add(160, first=0, priority=8)
    assert planned(steps.step()) == {"r1": 160, "r0": 96}, "The new row waits for the twin's prefix."
    assert twin.status is row.status is Status.RUNNING
    assert new.status is Status.WAITING


def test_nobody_passes_a_preempted_row() -> None:
    steps = Steps(num_blocks=6, max_num_tokens=64, prefix_cache=False)
    steps.add(16)
    steps.add(16)
    third = steps.add(16)
    steps.step()
    steps.scheduler._preempt(third)
    late = steps.add(1, max_tokens=1)
    steps.step()
    assert late.status is Status.WAITING, "It would fit, and would keep the preempted row out."


def test_a_hit_in_free_memory_needs_that_memory() -> None:
    """A free block that is a hit is no longer free once it is used: it counts as needed."""
    steps = Steps(num_blocks=8, max_num_tokens=256)
    done = steps.add(64)
    steps.step()
    steps.end(done)
    holder = steps.add(64, first=7)
    steps.step()  # four blocks are held, four are free and hold what the first row computed
    twin = steps.add(65, first=0)
    assert len(steps.scheduler.cache.find(twin)) == 4
    steps.step()
    assert twin.status is Status.WAITING
    steps.end(holder)
    steps.step()
    assert twin.status is Status.RUNNING and twin.num_cached_tokens == 48  # the fourth is used by now


def test_a_hit_in_memory_that_is_held_costs_nothing() -> None:
    steps = Steps(num_blocks=8, max_num_tokens=256)
    steps.add(96)
    steps.step()
    twin = steps.add(97, first=0)
    steps.step()
    assert twin.status is Status.RUNNING and twin.num_cached_tokens == 96


def test_no_more_rows_run_than_allowed() -> None:
    steps = Steps(num_blocks=64, max_num_tokens=64, max_num_seqs=3)
    for _ in range(10):
        steps.add(4)
    steps.step()
    assert steps.scheduler.num_running == 3 and steps.scheduler.num_waiting == 7


def test_looking_at_many_rows_with_one_prefix_is_spread_over_steps() -> None:
    """A thousand rows behind one prefix: one step looks at a few of them, not at all."""
    steps = Steps(num_blocks=64, max_num_tokens=64, max_num_seqs=8)
    steps.add(400, first=0)
    for _ in range(1000):
        steps.add(400, first=0)
    finds = 0
    find = steps.scheduler.cache.find

    def counting(seq: Sequence) -> list[int]:
        nonlocal finds
        finds += 1
        return find(seq)

    steps.scheduler.cache.find = counting  # type: ignore[method-assign]
    steps.step()
    assert finds <= 1 + 8
