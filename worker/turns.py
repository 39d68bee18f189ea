"""Whose turn the engine is, on a worker that may load several models: one at a time, and none for ever.

    nothing left to do      the next model that anybody waits for: at once where nobody else serves it, after
                            a few seconds where others do (they may be about to)
    there is work           stay for a slice, counted from the load; then the model whose jobs nobody serves
    … that others do too    at once the model that this worker alone may serve: those others stay

So a job that nobody else serves waits for the rest of one slice, the rows that are under way, and the load;
with three or more models that all have work, for a slice of each. A slice is at least four loads long, so
that most of the time goes to rows.

Clocks and numbers only: this room may not know Redis, nor how a model is loaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pagemill.jobs.status import Want

# Workers that see the same job at the same moment must not all load its model.
SPREAD_S = 2.0
HELP_S = 5.0
LOADS_IN_A_SLICE = 4.0


@dataclass(slots=True)
class Turns:
    """Asked every second. `spread` draws how long a worker hesitates, from 0 to 1."""

    slice_s: float
    spread: Callable[[], float] = random.random
    _unserved: dict[str, float] = field(default_factory=dict)  # model -> since when, plus the hesitation
    _wanted: dict[str, float] = field(default_factory=dict)

    def next(
        self, now: float, wants: Mapping[str, Want], loaded: str, since: float, load_s: float, busy: bool
    ) -> str | None:
        """The model to change to, or None to stay.

        wants: of every model that may be loaded now, the loaded one included. since: when it was ready.
        busy: whether shards of it run here.
        """
        self._notice(now, {model: want for model, want in wants.items() if model != loaded})
        waiting = [model for model, at in self._unserved.items() if at <= now]
        if busy or wants[loaded].jobs:
            if now - since < max(self.slice_s, LOADS_IN_A_SLICE * load_s):
                waiting = [model for model in waiting if wants[model].alone and wants[loaded].loaded]
            return min(waiting, key=self._unserved.__getitem__, default=None)
        if not waiting:
            waiting = [model for model, at in self._wanted.items() if at + HELP_S <= now]
        # What nobody else may serve, then by priority, then by who came first: what has just had its turn
        # waits behind what has not.
        return min(
            waiting,
            key=lambda model: (not wants[model].alone, -wants[model].priority, self._wanted[model]),
            default=None,
        )

    def _notice(self, now: float, others: Mapping[str, Want]) -> None:
        for model, want in others.items():
            hesitation = SPREAD_S * self.spread()
            _since(self._wanted, model, now + hesitation, want.jobs)
            _since(self._unserved, model, now + hesitation, want.unserved)
        for known in (self._wanted, self._unserved):
            for model in known.keys() - others.keys():
                del known[model]


def _since(known: dict[str, float], model: str, at: float, jobs: int) -> None:
    if jobs:
        known.setdefault(model, at)
    else:
        known.pop(model, None)
