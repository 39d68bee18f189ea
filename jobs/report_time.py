"""The report's charts over time: what was written and read, and how many rows were in engines.

This room knows a job's clock, and may not know the rest of the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pagemill.jobs.report import Clock
from pagemill.jobs.report_cards import key, none, section
from pagemill.jobs.report_charts import MOST_BARS, Axis, Bar, columns, round_step
from pagemill.jobs.report_words import DAY_S, elapsed, length, rows

STEPS_S = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200,
    *(days * DAY_S for days in (1, 2, 5, 10, 20, 50, 100)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Grid:
    """Moments between which there is a bar, equally far apart; only the last bar may be narrower.

    It is not lower for that: every bar is a mean over its own seconds.
    """

    edges: Sequence[int]

    @property
    def width(self) -> int:
        return self.edges[1] - self.edges[0]

    def chart(
        self, series: Sequence[str], sums: Iterable[tuple[float, ...]], unit: str, label: str, tip: str
    ) -> str:
        """Of what each bar's seconds come to.  tip: a format of the means."""
        start, bars = self.edges[0], []
        for (here, there), values in zip(pairwise(self.edges), sums, strict=True):
            means = tuple(round(value / (there - here), 6) for value in values)  # without the dust of floats
            when = f"{length(here - start)} to {length(there - start)}"
            bars.append(Bar(here - start, there - start, means, f"{when}: {tip.format(*means)}"))
        if not any(any(bar.values) for bar in bars):
            return none("None at any time.")
        return columns(bars, series, _axis(self.edges[-1] - start), label=label, unit=unit)


def over_time(clock: Clock) -> str:
    """The cards of a job's charts over time."""
    start, end = clock.span
    if start == end:
        return section("Throughput", none("No row of this job says when it ended."))
    fitting = (step for step in STEPS_S if (end - start) / step <= MOST_BARS)
    grid = _Grid([*range(start, end, next(fitting, -(-(end - start) // MOST_BARS))), end])
    return _written(clock, grid) + _read(clock, grid) + _running(clock, grid)


def _written(clock: Clock, grid: _Grid) -> str:
    sums = ((tokens,) for tokens in _spread(clock.written(), grid))
    label = "Tokens written a second, over time"
    chart = grid.chart(("a",), sums, "tokens/s", label, "{0:,.0f} tokens/s")
    return section("Tokens written a second", chart, f"Answers; {length(grid.width)} a bar.")


def _read(clock: Clock, grid: _Grid) -> str:
    read, cached = _gathered(clock.read, grid), _gathered(clock.cached, grid)
    sums = ((tokens - hits, hits) for tokens, hits in zip(read, cached, strict=True))
    label = "Tokens of prompts a second, over time"
    tip = "{0:,.0f} tokens/s computed, {1:,.0f} from the cache"
    keys = f"Prompts: {key('b', 'computed')} {key('c', 'from the prefix cache')}"
    return section("Tokens read a second", grid.chart(("b", "c"), sums, "tokens/s", label, tip), keys)


def _running(clock: Clock, grid: _Grid) -> str:
    sums = ((seconds,) for seconds in _spread(clock.running(), grid))
    chart = grid.chart(("d",), sums, "rows", "Rows in the engines, over time", "{0:,.1f} rows")
    best = rows(max(_gathered(clock.ended, grid)) / grid.width)
    said = f"On average over a bar; in the best one, {best} a second ended."
    return section("Rows in the engines", chart, said)


def _gathered(counts: Counter[int], grid: _Grid) -> list[int]:
    """Sums of what lies in each bar."""
    sums = Counter[int]()
    for second, number in counts.items():
        sums[(second - grid.edges[0]) // grid.width] += number
    return [sums[index] for index in range(len(grid.edges) - 1)]


def _spread(levels: Iterable[tuple[int, int, float]], grid: _Grid) -> list[float]:
    """What levels come to in each bar, in units times seconds."""
    edges, sums = grid.edges, [0.0] * (len(grid.edges) - 1)
    for here, there, level in levels:
        while here < there:
            index = (here - edges[0]) // grid.width
            until = min(there, edges[index + 1])
            sums[index] += level * (until - here)
            here = until
    return sums


def _axis(seconds: int) -> Axis:
    step = next((step for step in STEPS_S if seconds / step <= 8), DAY_S * round_step(seconds / DAY_S / 8))
    marks = [place * step for place in range(int(seconds // step) + 1)]
    return Axis("since the first row began", marks, elapsed(step))
