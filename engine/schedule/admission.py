"""How much the rows will still want, learned from the rows of the same group that have run.

Reserving `max_tokens` for each row would leave most of the memory unused, reserving nothing would admit
rows only to throw them out again. So a row is let in if memory holds its prompt and what it and the others
are likely to produce. This file knows lengths only.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from pagemill.engine.config import BLOCK_SIZE
from pagemill.engine.sequence import Sequence

# Until rows have ended, answers are taken to be this long. It weighs as much as one ended row.
_PRIOR_TOKENS = 256.0
# Older rows fade: after so many others a row counts for a third.
_MEMORY_ROWS = 512
# Groups that lengths are kept of; beyond, whoever was not seen longest is forgotten. Two numbers each.
_MOST_GROUPS = 256

# Share of the expected growth that has to be free. Rows end one after another and give their memory back,
# so the whole of it is never needed at once; half was enough for rows of equal length out of step.
_CAUTION_START = 0.5
_CAUTION_LEAST = 0.25
_CAUTION_MOST = 1.5
_CAUTION_AFTER_PREEMPTION = 0.2
_CAUTION_DECAY = 0.999

# A prompt goes through the model in bulk: so many of its tokens hold the engine up like one of an answer.
_PROMPT_TOKENS_LIKE_ONE = 16


class OutputLength:
    """Expected number of tokens a row will still produce.

    Rows that still run, and those cut by their limit, have told only that they are longer than so much; to
    average the ended ones alone would be biased short. Tokens produced by all rows, over rows that ended of
    themselves, is the estimate that takes this into account (maximum likelihood with censored
    observations, if ending is equally likely at each token).
    """

    def __init__(self, prior: float = _PRIOR_TOKENS) -> None:
        self._tokens = prior
        self._ended = 1.0

    @property
    def expected(self) -> float:
        return self._tokens / self._ended

    def within(self, limit: float) -> float:
        """The same for a row that is cut after `limit` more tokens, with the same chance at each."""
        return -self.expected * math.expm1(-limit / self.expected)

    def produced(self, tokens: int) -> None:
        self._tokens += tokens

    def ended(self) -> None:
        """A row has ended of itself, neither cut nor aborted."""
        fade = 1 - 1 / _MEMORY_ROWS
        self._tokens *= fade
        self._ended = self._ended * fade + 1


class Lengths:
    """An OutputLength for each group. A new group begins with what all of them have taught.

    Rows that nothing but their limit can end are known in advance, and teach nothing.
    """

    def __init__(self) -> None:
        self._all = OutputLength()
        self._groups: OrderedDict[str, OutputLength] = OrderedDict()

    def of(self, group: str) -> OutputLength:
        length = self._groups.get(group)
        if length is None:
            length = self._groups[group] = OutputLength(self._all.expected)
            if len(self._groups) > _MOST_GROUPS:
                self._groups.popitem(last=False)
        else:
            self._groups.move_to_end(group)
        return length

    def produced(self, seq: Sequence) -> None:
        """The row has one token more."""
        if not seq.request.sampling.endless:
            self._all.produced(1)
            self.of(seq.request.group).produced(1)

    def ended(self, seq: Sequence) -> None:
        self._all.ended()
        self.of(seq.request.group).ended()


class Admission:
    """Says what a row is expected to want. learned: by its group's lengths; else its limit is believed."""

    def __init__(self, max_tokens_per_row: int, *, learned: bool = True) -> None:
        self.lengths = Lengths()
        self.caution = _CAUTION_START
        self._learned = learned
        self._max_tokens_per_row = max_tokens_per_row

    def growth(self, seq: Sequence) -> float:
        """Blocks that the row is expected to want beyond its tokens so far."""
        return (self.caution if self._learned else 1.0) * self._tokens_to_come(seq) / BLOCK_SIZE

    def work(self, seq: Sequence) -> float:
        """What the row is expected to cost, in tokens of an answer."""
        return self._tokens_to_come(seq) + len(seq.token_ids) / _PROMPT_TOKENS_LIKE_ONE

    def _tokens_to_come(self, seq: Sequence) -> float:
        sampling = seq.request.sampling
        left = min(
            sampling.max_tokens - seq.num_output_tokens,
            self._max_tokens_per_row - len(seq.token_ids),
        )
        if sampling.endless or not self._learned:
            return left
        return self.lengths.of(seq.request.group).within(left)

    def step(self) -> None:
        """A step went by without trouble: dare a little more."""
        self.caution = max(_CAUTION_LEAST, self.caution * _CAUTION_DECAY)

    def preempted(self) -> None:
        """Too much was dared."""
        self.caution = min(_CAUTION_MOST, self.caution + _CAUTION_AFTER_PREEMPTION)
