"""How many rows may run while memory is short.

Weights and key-value memory are sized at the start, but a machine has other tenants. When less than a
reserve is left, the limit on running rows halves, down to one; while there is enough, it grows back by an
eighth at each look. Nobody is thrown out: rows above the limit run to their end and no new ones are let in,
so less key-value memory is touched for the first time, which is when the system has to find it.
It may not know the scheduler, nor what memory is used for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pagemill.engine.run.available import available_memory

log = logging.getLogger(__name__)

# Below the first the limit halves, above the second it grows; between them it stays. The gap keeps it from
# swinging with every row that ends.
RESERVE_BYTES = 256 << 20
AMPLE_BYTES = 512 << 20
LOOK_S = 1.0


class Pressure:
    """`rows()` is asked before each step; it looks at the machine once a second."""

    def __init__(
        self,
        most_rows: int,
        *,
        available: Callable[[], int | None] = available_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._limit = most_rows, most_rows
        self._available, self._clock = available, clock
        self._look_at = clock()

    def rows(self) -> int:
        """How many rows may run now: at least one, so that there is always an end."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._adapt(self._available())
        return self._limit

    def _adapt(self, available: int | None) -> None:
        if available is None:
            return
        before = self._limit
        if available < RESERVE_BYTES:
            self._limit = max(1, before // 2)
        elif available > AMPLE_BYTES:
            self._limit = min(self._most, before + max(1, before // 8))
        if self._limit < before:
            log.warning(
                "Memory is short (%d MiB are free): at most %d rows run at once, of %d.",
                available >> 20,
                self._limit,
                self._most,
            )
        elif before < self._limit == self._most:
            log.info("Memory suffices again: %d rows may run at once.", self._most)
