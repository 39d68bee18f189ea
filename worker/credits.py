"""How much may be down in the engine's process at once, and who is next when some of it comes back.

Counting only: it may not know what rows are.
"""

from __future__ import annotations

import asyncio
from collections import deque

LEAST_ROWS = 128


def rows_in_flight(step_rows: int) -> int:
    """How many may be down where nobody says, with so many in one step of the engine: those of the next lie
    ready while it runs."""
    return max(LEAST_ROWS, 2 * step_rows)


class Credits:
    """How many rows, and how many of their bytes, may be down in the child. First come, first served.

    A row larger than all the bytes goes alone.
    """

    def __init__(self, rows: int, size: int) -> None:
        self.limit, self._rows, self._bytes = rows, rows, size
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        if not self._waiters and self._fits(size):
            self._move(-1, -size)
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiters.append((size, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give(size)  # granted in the same moment as cancelled
            else:
                granted.cancel()
                self._grant()  # it may have been the one at the head that did not fit
            raise

    def give(self, size: int) -> None:
        self._move(1, size)
        self._grant()

    def resize(self, limit: int) -> None:
        """How many rows may be down from now on; those that are too many are let go by, not called back."""
        change, self.limit = limit - self.limit, limit
        self._move(change, 0)
        self._grant()

    def _grant(self) -> None:
        while self._waiters:
            size, granted = self._waiters[0]
            if not granted.done():
                if not self._fits(size):
                    return
                self._move(-1, -size)
                granted.set_result(None)
            self._waiters.popleft()

    def _fits(self, size: int) -> bool:
        return self._rows == self.limit or (self._rows > 0 and self._bytes >= size)

    def _move(self, rows: int, size: int) -> None:
        self._rows += rows
        self._bytes += size
