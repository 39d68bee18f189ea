"""How much memory the running rows will still want, learned from the rows that have run.

Reserving `max_tokens` for each row would leave most of the memory unused, reserving nothing would admit
rows only to throw them out again. So a row is let in if memory holds its prompt and what it and the others
are likely to produce. This file knows lengths only.
"""

from __future__ import annotations

from pagemill.engine.config import BLOCK_SIZE
from pagemill.engine.sequence import Sequence

# Until rows have ended, answers are taken to be this long. It weighs as much as one ended row.
_PRIOR_TOKENS = 256.0
# Older rows fade: after so many others a row counts for a third.
_MEMORY_ROWS = 512

# Share of the expected growth that has to be free. Rows end one after another and give their memory back,
# so the whole of it is never needed at once; half was enough for rows of equal length out of step.
_CAUTION_START = 0.5
_CAUTION_LEAST = 0.25
_CAUTION_MOST = 1.5
_CAUTION_AFTER_PREEMPTION = 0.2
_CAUTION_DECAY = 0.999


class OutputLength:
    """Expected number of tokens a row will still produce.

    Rows that still run, and those cut by their limit, have told only that they are longer than so much; to
    average the ended ones alone would be biased short. Tokens produced by all rows, over rows that ended of
    themselves, is the estimate that takes this into account (maximum likelihood with censored
    observations, if ending is equally likely at each token).
    """

    def __init__(self) -> None:
        self._tokens = _PRIOR_TOKENS
        self._ended = 1.0

    @property
    def expected(self) -> float:
        return self._tokens / self._ended

    def produced(self, tokens: int) -> None:
        self._tokens += tokens

    def ended(self) -> None:
        """A row has ended of itself, neither cut nor aborted."""
        fade = 1 - 1 / _MEMORY_ROWS
        self._tokens *= fade
        self._ended = self._ended * fade + 1


class Admission:
    """Decides whether one more row's memory fits."""

    def __init__(self, max_tokens_per_row: int) -> None:
        self.length = OutputLength()
        self.caution = _CAUTION_START
        self._max_tokens_per_row = max_tokens_per_row

    def growth(self, seq: Sequence) -> float:
        """Blocks that the row is expected to want beyond its tokens so far."""
        left = min(
            seq.request.sampling.max_tokens - seq.num_output_tokens,
            self._max_tokens_per_row - len(seq.token_ids),
        )
        return self.caution * min(left, self.length.expected) / BLOCK_SIZE

    def step(self, tokens_produced: int) -> None:
        """A step went by without trouble: dare a little more."""
        self.length.produced(tokens_produced)
        self.caution = max(_CAUTION_LEAST, self.caution * _CAUTION_DECAY)

    def preempted(self) -> None:
        """Too much was dared."""
        self.caution = min(_CAUTION_MOST, self.caution + _CAUTION_AFTER_PREEMPTION)
