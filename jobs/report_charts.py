"""Charts as SVG text, drawn by hand: bars that may be stacked, and bars that lie.

Colours are classes of the page's style, so that one chart serves light and dark; a title in each bar is what
a pointer over it shows. This room may not know what the figures mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDE, NARROW, HEIGHT = 1000, 480, 170  # as many pixels as the page gives them, so that text keeps its size
LEFT, RIGHT, TOP, BOTTOM = 46, 6, 10, 24
MOST_BARS = 96


@dataclass(frozen=True, slots=True)
class Bar:
    """One place on the axis: from `start` to `end`, with a value for each series. tip: shown on hovering."""

    start: float
    end: float
    values: tuple[float, ...]
    tip: str


def columns(
    bars: Sequence[Bar],
    series: Sequence[str],
    *,
    label: str,
    axis: Callable[[float], str],
    ticks: Sequence[float],
    width: int = WIDE,
) -> str:
    """Bars beside each other, the series stacked in each; series: a CSS class for each.

    label: what the chart says to whoever cannot see it.  axis: how a place on the axis is written.
    """
    left, right = bars[0].start, max(bars[-1].end, bars[0].start + 1e-9)
    high = max(sum(bar.values) for bar in bars) or 1.0
    marks = list(_marks(high))
    top = marks[-1]

    def x(place: float) -> float:
        return LEFT + (place - left) / (right - left) * (width - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    lines = [
        f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>'
        f'<text class="tick" x="{LEFT - 7}" y="{y(mark) + 4:.1f}" text-anchor="end">{short(mark)}</text>'
        for mark in marks
    ]
    for place in ticks:
        if left <= place <= right:
            anchor = "start" if x(place) < LEFT + 12 else "end" if x(place) > width - RIGHT - 24 else "middle"
            lines.append(
                f'<text class="tick" x="{x(place):.1f}" y="{HEIGHT - 7}" text-anchor="{anchor}">'
                f"{escape(axis(place))}</text>"
            )
    lines += [_column(bar, series, x, y) for bar in bars if any(bar.values)]
    return (
        f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(lines)}</svg>'
    )


def _column(bar: Bar, series: Sequence[str], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    gap = min(1.0, (x(bar.end) - x(bar.start)) / 6)
    here, width = x(bar.start) + gap / 2, max(0.5, x(bar.end) - x(bar.start) - gap)
    below, parts = 0.0, []
    for name, value in zip(series, bar.values, strict=True):
        low, high = y(below), y(below + value)
        below += value
        parts.append(
            f'<rect class="{name}" x="{here:.2f}" y="{high:.2f}" width="{width:.2f}"'
            f' height="{low - high:.2f}"/>'
        )
    return f"<g><title>{escape(bar.tip)}</title>{''.join(parts)}</g>"


def shares(counts: Iterable[tuple[str, int]], total: int) -> str:
    """Lying bars with their names and counts, as rows of a table."""
    rows = []
    for name, count in counts:
        share = count / total if total else 0.0
        rows.append(
            f'<tr><th scope="row">{escape(name)}</th><td class="number">{count:,}</td>'
            f'<td class="number">{share:.1%}</td>'
            f'<td class="wide"><div class="bar" style="width:{100 * share:.2f}%"></div></td></tr>'
        )
    return f"<table>{''.join(rows)}</table>"


def short(value: float) -> str:
    """A number as an axis has it: 950, 1.5k, 20M."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.4g}{letter}"
    return f"{value:.3g}"


def _marks(high: float) -> Iterator[float]:
    """About four round values from 0, the last one not below `high`."""
    step = round_step(high / 4)
    for number in range(math.ceil(high / step - 1e-9) + 1):
        yield number * step


def round_step(least: float) -> float:
    """The next of …, 0.1, 0.2, 0.5, 1, 2, 5, 10, …"""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))
