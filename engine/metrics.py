"""What the engine has done and what it is doing, as numbers.

Counting only: it may not decide anything, and nothing here is read back by the scheduler.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pagemill.engine.batch import Batch, StepResult
from pagemill.engine.sequence import Status

# Rates are over this many seconds, so that they follow the work and do not flicker with single steps.
RATE_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """A snapshot; counters are since the engine was built, seconds are summed over its steps.

    rows_allowed: how many rows may run now; less than the limit while memory is short.
    waiting: rows not running, whether new, preempted, or parked behind a row that computes their prefix.
    cached_tokens / prompt_tokens: of the prompts admitted so far, how much the prefix cache gave.
    identical_rows: requests that got the tokens of an identical one, and appear in no figure but `finished`.
    prefilled_tokens: prompt and recomputed tokens that went through the model.
    batch_fill: mean share of the token budget in use.
    """

    running: int
    waiting: int
    rows_allowed: int
    blocks_used: int
    blocks_total: int
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    finished: int
    identical_rows: int
    preemptions: int
    steps: int
    batch_fill: float
    tokens_per_second: float
    schedule_seconds: float
    prepare_seconds: float
    forward_seconds: float
    sample_seconds: float
    finish_seconds: float

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def _decodes(batch: Batch, i: int) -> bool:
    """Whether row i computes just the token it sampled last; everything else is prefill or recompute."""
    start, length = batch.starts[i], batch.lengths[i]
    return batch.num_scheduled[i] == 1 and start + 1 == length > batch.sequences[i].num_prompt_tokens


@dataclass(slots=True)
class Meter:
    """Adds up steps. `recent` holds (time, tokens generated) of the last seconds.

    `step` is called between reading a batch's result and booking it.
    """

    token_budget: int
    steps: int = 0
    prefilled: int = 0
    generated: int = 0
    finished: int = 0
    scheduled: int = 0
    schedule_s: float = 0.0
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    finish_s: float = 0.0
    recent: deque[tuple[float, int]] = field(default_factory=deque)
    recent_tokens: int = 0

    def step(self, batch: Batch, result: StepResult, schedule_s: float, execute_s: float, now: float) -> None:
        drawn = zip(batch.sequences, result.token_ids, strict=True)
        produced = sum(token is not None and seq.status is not Status.FINISHED for seq, token in drawn)
        self.steps += 1
        self.generated += produced
        self.scheduled += batch.num_tokens
        self.prefilled += batch.num_tokens - sum(_decodes(batch, i) for i in range(len(batch.sequences)))
        self.schedule_s += schedule_s
        self.prepare_s += result.prepare_seconds
        self.sample_s += result.sample_seconds
        self.forward_s += max(0.0, execute_s - result.prepare_seconds - result.sample_seconds)
        self.recent.append((now, produced))
        self.recent_tokens += produced
        self._fade(now)

    def tokens_per_second(self, now: float) -> float:
        """Tokens generated a second over the last ten; 0 when nothing ran in them."""
        self._fade(now)
        if not self.recent:
            return 0.0
        # The first entry marks the start of the span: its own tokens were made before it.
        started, before = self.recent[0]
        return (self.recent_tokens - before) / (now - started) if now > started else 0.0

    def _fade(self, now: float) -> None:
        while self.recent and self.recent[0][0] < now - RATE_WINDOW_S:
            self.recent_tokens -= self.recent.popleft()[1]

    @property
    def batch_fill(self) -> float:
        return self.scheduled / (self.steps * self.token_budget) if self.steps else 0.0
