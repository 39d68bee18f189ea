"""Which row killed the engine: suspects are run again by themselves, and halved until one is left.

A crash proves only that one of the rows in the fatal step may be at fault; the others must not pay for it.
So the rows of that step go into quarantine: they run again with nothing else in the engine, first together
(what was killed from outside passes at once), then, if it dies again, in halves. A row is poison only after a
fresh engine died with it alone, twice, and a known-good row, the canary, went through in between: on a sick
machine every row would look like poison. About log2(n) restarts find one such row among n.

Pure bookkeeping over ids: it may not know of processes. Not in here yet: memory of suspects across workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

DEATHS_ALONE = 2


class Quarantine:
    """Groups of suspects that wait to be run by themselves; the last group is the one that runs."""

    def __init__(self) -> None:
        self._groups: list[list[str]] = []
        self._alone: Counter[str] = Counter()
        self._vouched = False

    @property
    def group(self) -> list[str] | None:
        """The rows that may be in the engine now; None when anything may."""
        return self._groups[-1] if self._groups else None

    @property
    def wants_canary(self) -> bool:
        """Whether the engine has to prove itself on a known-good row, alone, before anything else runs."""
        return bool(self._groups) and not self._vouched and self._alone[self._groups[-1][0]] > 0

    def vouch(self) -> None:
        """The canary went through."""
        self._vouched = True

    def holds(self, rid: str) -> bool:
        """Whether a row has to wait: for the canary, or for another group's turn."""
        return self.wants_canary or (bool(self._groups) and rid not in self._groups[-1])

    def done(self, rid: str) -> bool:
        """A row ended. True when that ends its group, so that others have their turn."""
        for group in self._groups:
            if rid in group:
                group.remove(rid)
                self._alone.pop(rid, None)
                break
        else:
            return False
        before = len(self._groups)
        self._groups = [group for group in self._groups if group]
        return len(self._groups) < before

    def crashed(self, suspects: Collection[str]) -> list[str]:
        """The engine died with these rows in its step. Returns the rows now known to be poison.

        Without a row in its step it died of something else, and nothing is learnt.
        """
        self._vouched = False
        if not suspects:
            return []
        if not self._groups:
            self._groups = [sorted(suspects)]
            return []
        group = self._groups.pop()
        # Rows of the group that had not entered the fatal step are cleared of this death, and leave.
        guilty = [rid for rid in group if rid in suspects] or group
        if len(guilty) > 1:
            middle = len(guilty) // 2
            self._groups += [guilty[middle:], guilty[:middle]]
            return []
        rid = guilty[0]
        self._alone[rid] += 1
        if self._alone[rid] < DEATHS_ALONE:
            self._groups.append([rid])
            return []
        del self._alone[rid]
        return [rid]
