"""Which row kills whole workers: what is known of a shard that did, kept where it outlives them all.

A lease that ends without seal, commit or release is a strike. A shard with two of them, or that was lost
many times although something of it was sealed each time, is run alone on its worker, in small groups whose
rows are written down before the engine gets them. Whoever takes it over after the next death knows which rows
were in there: those are halved, until one is left. It is poison when it has killed a worker alone twice, with
a known-good row passing before the second time: on a sick machine every row would look like it.

Pure bookkeeping over row indexes; it may not know Redis, nor how rows are run.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field

from pagemill.jobs.status import Lease
from pagemill.worker.blame import DEATHS_ALONE

STRIKES = 2
LOSSES = 5
GROUP = 8


def needs_isolation(lease: Lease) -> bool:
    """Whether this lease is on a shard that seems to kill its workers."""
    struck = lease.strikes >= STRIKES or lease.attempt > LOSSES
    return lease.kind == "shard" and lease.stop is None and struck


def has_killed(lease: Lease) -> bool:
    """Whether what this lease is on, and needs no engine, may have killed a worker (aside.py)."""
    return lease.strikes > 0


@dataclass(slots=True)
class Isolation:
    """groups: rows to be run together; the last one is the next. alone: how often a row died alone.

    deaths, why: of processes that merged the shard (aside.py); kept here, since a shard has one record.
    """

    groups: list[list[int]] = field(default_factory=list)
    alone: dict[int, int] = field(default_factory=dict)
    deaths: int = 0
    why: str = ""

    @classmethod
    def load(cls, text: str) -> Isolation:
        if not text:
            return cls()
        doc = json.loads(text)
        alone = {int(row): deaths for row, deaths in doc.get("alone", {}).items()}
        return cls(doc.get("groups", []), alone, doc.get("deaths", 0), doc.get("why", ""))

    def dump(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    def mourn(self, left: Collection[int]) -> int | None:
        """The last holder died with the last group in its engine. The row now known to be poison, if any.

        left: rows without a result; a row of the group that was sealed before the death is cleared.
        """
        suspects = [row for row in self.groups.pop() if row in left] if self.groups else []
        if len(suspects) > 1:
            middle = len(suspects) // 2
            self.groups += [suspects[middle:], suspects[:middle]]
            return None
        for row in suspects:
            self.alone[row] = self.alone.get(row, 0) + 1
            if self.alone[row] >= DEATHS_ALONE:
                return row
            self.groups.append([row])
        return None

    def next(self, left: Collection[int]) -> list[int]:
        """The rows to run now, which stay the last group until the next call: suspects first."""
        groups = ([row for row in group if row in left] for group in self.groups)
        self.groups = [group for group in groups if group] or [list(left)[:GROUP]]
        return self.groups[-1]

    @property
    def wants_canary(self) -> bool:
        """Whether the machine has to prove itself before the last group runs."""
        return any(self.alone.get(row) for row in self.groups[-1])
