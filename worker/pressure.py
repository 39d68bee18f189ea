"""How many rows at once the machine's memory bears: fewer after it ran out, more again after a quiet time.

An engine that dies of memory with n rows in its step gets half of them from then on, so that the next life
finishes something; each quiet spell doubles the limit until it is what was configured. Counting only: this
room may not know rows or processes.
"""

from __future__ import annotations

from dataclasses import dataclass

# After this long without another death, a lowered limit is doubled.
QUIET_S = 300.0


@dataclass(slots=True)
class Pressure:
    """full: the configured limit. limit: the one that holds now."""

    full: int
    quiet_s: float = QUIET_S
    limit: int = 0
    _quiet: float = 0.0

    def __post_init__(self) -> None:
        self.limit = self.full

    @property
    def lowered(self) -> bool:
        return self.limit < self.full

    def bears(self, rows: int) -> bool:
        """So many are the full limit from now on. Whether the limit is another now."""
        before, lowered, self.full = self.limit, self.lowered, rows
        self.limit = min(self.limit, rows) if lowered else rows
        return self.limit != before

    def ran_out(self, rows: int) -> bool:
        """Memory ran out with so many rows at work (0: with none, so rows are not the reason). Whether the
        limit is another now."""
        self._quiet = 0.0
        before = self.limit
        if rows:
            self.limit = max(1, min(rows, before) // 2)
        return self.limit < before

    def cleared(self) -> bool:
        """One row alone was the reason, however few ran beside it. Whether the limit is another now."""
        before, self.limit = self.limit, self.full
        return self.limit > before

    def passed(self, seconds: float) -> bool:
        """So much time went by without a death. Whether the limit is another now."""
        if not self.lowered:
            return False
        self._quiet += seconds
        if self._quiet < self.quiet_s:
            return False
        self._quiet, self.limit = 0.0, min(self.full, 2 * self.limit)
        return True
