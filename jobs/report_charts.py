"""Charts as SVG text, drawn by hand: bars that may be stacked, and bars that lie.

Places along the axis are percentages and heights pixels, so that a chart is as wide as its card and its text
keeps its size on a phone, on a wide screen and on paper. Colours are classes of the page's style, so that one
chart serves light and dark; a title in each bar is what a pointer over it shows. This room may not know what
the figures mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from pagemill.jobs.report_words import count, percent, short

PLOT, TOP = 136, 24  # pixels: of the bars, and above them for the name of the unit
TICKS, UNIT = PLOT + TOP + 17, PLOT + TOP + 34  # pixels from the top: where the axis's texts stand
MOST_BARS = 96


@dataclass(frozen=True, slots=True)
class Bar:
    """One place on the axis: from `start` to `end`, with a value for each series. tip: shown on hovering."""

    start: float
    end: float
    values: tuple[float, ...]
    tip: str


@dataclass(frozen=True, slots=True)
class Axis:
    """unit: what the places are.  marks: ascending.  write: how one is written."""

    unit: str
    marks: Sequence[float]
    write: Callable[[float], str]


def columns(
    bars: Sequence[Bar], series: Sequence[str], axis: Axis, *, label: str, unit: str, least_step: float = 0.0
) -> str:
    """Bars beside each other, the series stacked in each; series: a CSS class for each.

    label: what the chart says to whoever cannot see it.  unit: of the values; least_step: 1 where they can
    only be whole.
    """
    left, right = bars[0].start, bars[-1].end
    heights = list(_marks(max(sum(bar.values) for bar in bars) or 1.0, least_step))

    def x(place: float) -> float:
        return 100 * (place - left) / (right - left)

    def y(value: float) -> float:
        return TOP + PLOT - value / heights[-1] * PLOT

    lines = [
        f'<text class="unit" x="-40" y="12">{escape(unit)}</text>',
        f'<text class="unit end" x="100%" y="{UNIT}">{escape(axis.unit)}</text>',
    ]
    lines += [
        f'<line class="grid" x1="0" x2="100%" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>'
        f'<text class="tick end" x="-7" y="{y(mark) + 4:.1f}">{short(mark)}</text>'
        for mark in heights
    ]
    lines += [
        f'<text class="tick{" odd" if number % 2 else ""}" x="{x(place):.3f}%" y="{TICKS}">'
        f"{escape(axis.write(place))}</text>"
        for number, place in enumerate(place for place in axis.marks if left <= place <= right)
    ]
    lines += [_column(bar, series, x, y) for bar in bars if any(bar.values)]
    return f'<svg role="img" aria-label="{escape(label)}">{"".join(lines)}</svg>'


def _column(bar: Bar, series: Sequence[str], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    gap = min(0.15, (x(bar.end) - x(bar.start)) / 6)
    here, width = x(bar.start) + gap / 2, x(bar.end) - x(bar.start) - gap
    below, parts = 0.0, []
    for name, value in zip(series, bar.values, strict=True):
        low, high = y(below), y(below + value)
        below += value
        parts.append(
            f'<rect class="{name}" x="{here:.3f}%" y="{high:.2f}" width="{width:.3f}%"'
            f' height="{low - high:.2f}"/>'
        )
    return f"<g><title>{escape(bar.tip)}</title>{''.join(parts)}</g>"


def shares(counts: Iterable[tuple[str, int]], total: int) -> str:
    """Lying bars with their names and counts, as rows of a table."""
    rows = []
    for name, number in counts:
        share = number / total if total else 0.0
        rows.append(
            f'<tr><th scope="row">{escape(name)}</th><td class="number">{count(number)}</td>'
            f'<td class="number">{percent(number, total)}</td>'
            f'<td class="wide"><div class="bar" style="width:{100 * share:.2f}%"></div></td></tr>'
        )
    return f"<table>{''.join(rows)}</table>"


def _marks(high: float, least_step: float) -> Iterator[float]:
    """About four round values from 0, the last one not below `high`."""
    step = max(least_step, round_step(high / 4))
    for number in range(math.ceil(high / step - 1e-9) + 1):
        yield number * step


def round_step(least: float) -> float:
    """The next of …, 0.1, 0.2, 0.5, 1, 2, 5, 10, …"""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))
