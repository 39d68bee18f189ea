"""Which prefixes are being computed right now, and who waits for them.

Rows with one long prompt prefix arrive together. If all were admitted, each would prefill that prefix, as
nothing is in the cache until a step has finished. So the first computes it, and the others wait unadmitted
and holding nothing until it is published, or until the row that computes it gives up.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagemill.engine.cache.prefix import extend_hashes
from pagemill.engine.config import BLOCK_SIZE
from pagemill.engine.sequence import Sequence, Status


class InFlight:
    """Block hash -> the running row that will publish it, and the rows parked behind that hash."""

    def __init__(self) -> None:
        self._computing: dict[bytes, Sequence] = {}
        self._parked: dict[bytes, list[Sequence]] = {}

    def begin(self, seq: Sequence) -> None:
        """The row was admitted and will compute every full block it does not have yet."""
        end = len(seq.token_ids) // BLOCK_SIZE
        extend_hashes(seq, end)
        for label in seq.block_hashes[seq.num_computed_tokens // BLOCK_SIZE : end]:
            self._computing.setdefault(label, seq)

    def awaited(self, seq: Sequence, first: int, end: int) -> bytes | None:
        """What to wait for before computing blocks `first` to `end`: the last of those that a running row
        computes without a gap. None when the first of them is nobody's work."""
        last = None
        for label in seq.block_hashes[first:end]:
            if label not in self._computing:
                break
            last = label
        return last

    def park(self, seq: Sequence, label: bytes) -> None:
        seq.parked = True
        self._parked.setdefault(label, []).append(seq)

    def published(self, labels: Iterable[bytes]) -> list[Sequence]:
        """These blocks are done; the rows that waited for them."""
        released: list[Sequence] = []
        for label in labels:
            self._computing.pop(label, None)
            released += self._parked.pop(label, ())
        for seq in released:
            seq.parked = False
        return [seq for seq in released if seq.status is Status.WAITING]

    def give_up(self, seq: Sequence) -> list[Sequence]:
        """The row stops running; the rows that waited for what it has not published."""
        return self.published([label for label in seq.block_hashes if self._computing.get(label) is seq])

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError if somebody waits for a block that no running row computes. For tests."""
        rows = set(running)
        assert all(seq in rows for seq in self._computing.values()), "A row computes and does not run."
        assert self._parked.keys() <= self._computing.keys(), "A row waits for a block that nobody computes."
        for parked in self._parked.values():
            assert all(seq.parked and not seq.block_table for seq in parked), "A parked row holds blocks."
