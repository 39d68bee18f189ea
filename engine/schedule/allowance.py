"""How many tokens a step may hold after one was too large for the device's memory.

Half of what failed, and back by an eighth of the whole after every so many steps that went well: another
program on the card may have gone, or memory may lie better. Knows numbers only.
"""

from __future__ import annotations

# Steps that have to go well before more is tried: a step that fails is computed again, so seldom is enough.
PATIENCE = 256


class TokenAllowance:
    def __init__(self, most: int) -> None:
        self.tokens = self._most = most
        self._good = 0

    def failed(self, num_tokens: int) -> None:
        """A step of so many tokens was too large. At least one is always allowed."""
        self.tokens = max(1, min(self.tokens, num_tokens) // 2)
        self._good = 0

    def went_well(self) -> None:
        if self.tokens == self._most:
            return
        self._good += 1
        if self._good >= PATIENCE:
            self._good = 0
            self.tokens = min(self._most, self.tokens + max(1, self._most // 8))
