"""Which rows compute how many tokens in the next step.

There are no phases. A row has computed `num_computed_tokens` of its tokens and wants to compute the rest;
a step gives it as many as the token budget leaves. A prompt in chunks, the tail after a prefix hit, a
decode, and the recompute of a preempted row are all that.

    schedule()   running rows first, decodes before chunks, then waiting rows while budget and memory last
    begun()      the batch is on its way: its tokens count as computed, and those that it draws as there
    (it runs; meanwhile the next may be scheduled and begun)
    advance()    its result was read: full blocks are published, rows parked behind them released
    remove()     a row has ended: its blocks are free, and stay hits until they are used again

Memory is taken block by block. When it runs out, the running row that arrived last gives way: its blocks
are freed, its tokens kept, and it waits like a new row. The oldest row never does, and a row computes at
least one token whenever it is its turn, so something always ends: there is no deadlock, and no two rows
throw each other out for ever. A step that preempts admits nobody.

While results are unread, a row may have ended without anybody knowing; then the step that it is in is wasted,
and no more than that one. Whatever needs to know waits: nobody is preempted, no row that is in an unread step
is admitted or begun anew, and a row whose unread token is its last by count is not scheduled. Memory that a
row gives back meanwhile may be used at once, as the device takes steps in the order in which they were begun.

This file knows sequences and block counts. It may not know tensors or text, nor why a row ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from pagemill.engine.batch import Batch
from pagemill.engine.cache.blocks import BlockPool
from pagemill.engine.cache.prefix import PrefixCache
from pagemill.engine.config import BLOCK_SIZE, SchedulerConfig
from pagemill.engine.schedule.admission import Admission
from pagemill.engine.schedule.allowance import TokenAllowance
from pagemill.engine.schedule.inflight import InFlight
from pagemill.engine.schedule.order import WaitingQueue
from pagemill.engine.sequence import Sequence, Status


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


class Scheduler:
    def __init__(self, limits: SchedulerConfig) -> None:
        self.limits = limits
        self.max_num_seqs = limits.max_num_seqs  # less while memory is short; who runs already goes on
        self.allowance = TokenAllowance(limits.max_num_tokens)  # less after a step that was too large
        self.pool = BlockPool(limits.num_blocks)
        self.cache = PrefixCache(self.pool, enabled=limits.prefix_cache)
        self.admission = Admission(limits.max_tokens_per_row, learned=limits.learned_lengths)
        self.preemptions = 0
        self.prompt_tokens = 0  # of admitted rows, and how many of them the cache gave
        self.cached_tokens = 0
        self._waiting = WaitingQueue(
            by_prefix=limits.prefix_cache and limits.prefix_order, long_first=limits.long_rows_first
        )
        self._inflight = InFlight()
        self._running: list[Sequence] = []  # in order of arrival
        self._num_waiting = 0
        self._num_unread = 0  # batches begun and not read

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def add(self, seq: Sequence) -> None:
        """A new row, whose prompt fits the whole pool (what does not is refused before)."""
        self._num_waiting += 1
        seq.long_rope = self._outgrown(seq)
        seq.work = self.admission.work(seq)
        self._waiting.push(seq)

    def promote(self, seq: Sequence, priority: int) -> None:
        """Raise the row's priority, if that is higher; a row that runs keeps running."""
        if priority <= seq.priority:
            return
        seq.priority = priority
        if (
            seq.status is Status.WAITING and not seq.parked
        ):  # a parked row is in no queue until it is released
            (self._waiting.push_first if seq.num_preemptions else self._waiting.push)(seq)

    def schedule(self) -> Batch:
        """Choose the next batch; its rows' block tables cover what they are to compute. An empty one where
        nobody can go on before the results of steps that were begun are read."""
        for seq in self._running:
            if self._outgrown(seq) and not seq.long_rope and not seq.num_unread_steps:
                self._begin_anew(seq)
        plan: dict[Sequence, int] = {}
        preemptions = self.preemptions
        budget = self._continue_running(plan)
        if budget is None:
            return Batch((), ())
        if self.preemptions == preemptions:
            self._admit(plan, budget)
        if not plan and not self._num_unread and (self._running or self._num_waiting):
            raise RuntimeError(
                f"No row can go on: {len(self._running)} running, {self._num_waiting} waiting, "
                f"{self.pool.num_free} of {self.pool.num_blocks} blocks free."
            )
        return Batch(tuple(plan), tuple(plan.values()))

    def begun(self, batch: Batch) -> None:
        """The batch is on its way; what is begun after it comes after it."""
        self._num_unread += 1
        for i, (seq, scheduled) in enumerate(zip(batch.sequences, batch.num_scheduled, strict=True)):
            seq.num_computed_tokens += scheduled
            seq.num_unread_steps += 1
            seq.num_unread_tokens += batch.samples(i)

    def advance(self, batch: Batch, finite: Iterable[bool]) -> None:
        """The oldest batch has run; who has drawn a token is to be given it now. Only rows with finite
        results have computed anything: the others' memory is never published, and they are to be removed."""
        self._num_unread -= 1
        for i, (seq, good) in enumerate(zip(batch.sequences, finite, strict=True)):
            seq.num_unread_steps -= 1
            seq.num_unread_tokens -= batch.samples(i)
            if not good or seq.status is Status.FINISHED:
                continue
            if batch.samples(i):
                self.admission.lengths.produced(seq)
            if seq.status is Status.RUNNING:
                begin = batch.starts[i]
                labels = self.cache.publish(seq, begin, begin + batch.num_scheduled[i])
                if labels:
                    self._release(self._inflight.published(labels))
        self.admission.step()
        self.allowance.went_well()

    def remove(self, seq: Sequence) -> None:
        """A row has ended, whatever it was doing."""
        if seq.status is Status.RUNNING:
            if seq.finish_reason == "stop":
                self.admission.lengths.ended(seq)
            self._vacate(seq)
        waited = seq.status is Status.WAITING
        seq.status = Status.FINISHED
        if waited:
            self._num_waiting -= 1
            self._waiting.trim(self._num_waiting)

    def _outgrown(self, seq: Sequence) -> bool:
        return self.limits.rope_switch is not None and seq.num_tokens > self.limits.rope_switch

    def _goes_on(self, seq: Sequence) -> bool:
        """Whether the running row can have a step before more results are read."""
        if not seq.num_unread_steps:
            return True
        if self._outgrown(seq) and not seq.long_rope:
            return False
        sampling = seq.request.sampling
        last = min(seq.num_prompt_tokens + sampling.max_tokens, self.limits.max_tokens_per_row)
        return not seq.num_unread_tokens or seq.num_tokens < last

    def _begin_anew(self, seq: Sequence) -> None:
        """The row has outgrown the context that its keys were made for: it keeps running and its place, and
        computes all its tokens again."""
        released = self._inflight.give_up(seq)
        self.pool.release(seq.block_table)
        self._turn_long(seq)
        found = self.cache.find(seq)
        self.pool.share(found)
        seq.block_table = found
        seq.num_computed_tokens = len(found) * BLOCK_SIZE
        if self.cache.enabled:
            self._inflight.begin(seq)
        self._release(released)

    def _turn_long(self, seq: Sequence) -> None:
        """Its keys are others from now on, and so are its blocks."""
        seq.long_rope = True
        seq.block_hashes = []

    def _continue_running(self, plan: dict[Sequence, int]) -> int | None:
        """Schedule rows that run already, and return what is left of the budget; None where one of them has
        to have another's memory, which is nobody's to take while results are unread.

        Decodes first: a long prompt must not hold up rows that need one token each.
        """
        budget = self.allowance.tokens
        ready = [seq for seq in self._running if self._goes_on(seq)]
        decoding = [seq for seq in ready if seq.num_uncomputed_tokens == 1]
        filling = [seq for seq in ready if seq.num_uncomputed_tokens > 1]
        for seq in decoding + filling:
            if budget == 0:
                break
            if seq.status is not Status.RUNNING:
                continue  # it made room for an older one
            if self._num_unread and not self._places(seq):
                return None
            budget += self._make_room(seq, plan)
            if seq.status is Status.RUNNING:
                budget -= self._grow(seq, budget, plan)
        return budget

    def _make_room(self, seq: Sequence, plan: dict[Sequence, int]) -> int:
        """Preempt rows, perhaps this one itself, until its next token has a place; returns the budget that
        they had been given in this step."""
        returned = 0
        while not self._places(seq) and seq.status is Status.RUNNING:
            victim = self._running[-1]
            returned += plan.pop(victim, 0)
            self._preempt(victim)
        return returned

    def _places(self, seq: Sequence) -> int:
        """How many more tokens of the row have a place in its blocks and the free ones."""
        return (len(seq.block_table) + self.pool.num_free) * BLOCK_SIZE - seq.num_computed_tokens

    def _grow(self, seq: Sequence, budget: int, plan: dict[Sequence, int]) -> int:
        """Schedule as many of the row's tokens as budget and memory allow, and give it blocks for them."""
        count = min(seq.num_uncomputed_tokens, budget, self._places(seq))
        missing = blocks_for(seq.num_computed_tokens + count) - len(seq.block_table)
        if missing > 0:
            seq.block_table += self.pool.take(missing)
        plan[seq] = count
        return count

    def _preempt(self, seq: Sequence) -> None:
        self._vacate(seq)
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self.preemptions += 1
        self.admission.preempted()
        self._num_waiting += 1
        self._waiting.push_first(seq)

    def _vacate(self, seq: Sequence) -> None:
        """Stop running: nothing of the row is in memory any more, unless the cache still has it."""
        self._running.remove(seq)
        self._release(self._inflight.give_up(seq))
        self.pool.release(seq.block_table)
        seq.block_table = []
        seq.num_computed_tokens = 0

    def _release(self, parked: list[Sequence]) -> None:
        for seq in parked:
            self._waiting.push_back(seq)

    def _admit(self, plan: dict[Sequence, int], budget: int) -> None:
        """Let waiting rows in, in their order; the first that does not fit ends it: none is passed over."""
        if not self._num_waiting or budget == 0 or len(self._running) >= self.max_num_seqs:
            return
        # What the running rows are going to take: the rest of their prompts for sure, their answers perhaps.
        promised = sum(blocks_for(seq.num_tokens) - len(seq.block_table) for seq in self._running)
        growth = sum(map(self.admission.growth, self._running))
        parked = 0
        while budget > 0 and len(self._running) < self.max_num_seqs:
            seq = self._waiting.pop()
            if seq is None:
                break
            if seq.num_unread_steps:  # it gave way since they were begun, and not all its tokens are known
                self._waiting.push_first(seq)
                break
            if self._outgrown(seq) and not seq.long_rope:  # it gave way with the token that did it
                self._turn_long(seq)
            found = self.cache.find(seq)
            if self._park(seq, len(found)):
                parked += 1
                if parked == self.limits.max_num_seqs:
                    break  # a hundred thousand rows with one prefix are looked at over many steps
                continue
            if not self._fits(seq, found, promised, growth):
                self._waiting.push_first(seq)
                break
            self._start(seq, found)
            # Of a row that gets less than all its tokens the budget is used up, and it is the last one.
            budget -= self._grow(seq, budget, plan)
            growth += self.admission.growth(seq)

    def _park(self, seq: Sequence, found: int) -> bool:
        """Whether the row is to wait for a prefix that a running row computes.

        A row that was preempted does not: it has waited, and others must not pass it.
        """
        if not self.cache.enabled or seq.num_preemptions:
            return False
        label = self._inflight.awaited(seq, found, self.cache.usable_blocks(seq))
        if label is None:
            return False
        self._inflight.park(seq, label)
        return True

    def _fits(self, seq: Sequence, found: list[int], promised: int, growth: float) -> bool:
        """Whether memory holds the row's tokens and what all rows may still want."""
        if not self._running:
            return True
        needed = blocks_for(len(seq.token_ids)) - sum(not self.pool.is_free(block) for block in found)
        if seq.num_preemptions:
            # Its place must last a while, or it would be thrown out again at once.
            return needed + promised + len(self._running) <= self.pool.num_free
        return needed + promised + growth + self.admission.growth(seq) <= self.pool.num_free

    def _start(self, seq: Sequence, found: list[int]) -> None:
        self.pool.share(found)
        seq.block_table = found
        seq.num_computed_tokens = len(found) * BLOCK_SIZE
        if not seq.num_preemptions:
            # A row that goes on after another that failed has output too, and hits may reach into it.
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self.prompt_tokens += seq.num_prompt_tokens
            self.cached_tokens += seq.num_cached_tokens
        seq.status = Status.RUNNING
        self._num_waiting -= 1
        insort(self._running, seq, key=lambda row: row.arrival)
        if self.cache.enabled:
            self._inflight.begin(seq)

    def check(self, rows: Iterable[Sequence]) -> None:
        """Raise AssertionError unless everything agrees; `rows` are all that are in flight. For tests."""
        rows = list(rows)
        running = [seq for seq in rows if seq.status is Status.RUNNING]
        waiting = [seq for seq in rows if seq.status is Status.WAITING]
        assert self._running == sorted(running, key=lambda seq: seq.arrival), "Running rows are not listed."
        assert self._num_waiting == len(waiting), "The count of waiting rows is wrong."
        self.pool.check(seq.block_table for seq in running)
        self._inflight.check(running)
        for seq in waiting:
            assert not seq.block_table and not seq.num_computed_tokens, "A waiting row holds memory."
        for seq in running:
            assert seq.num_computed_tokens <= len(seq.block_table) * BLOCK_SIZE, (
                "A computed token has no place."
            )
            assert seq.num_computed_tokens < seq.num_tokens, "A running row has nothing to do."
