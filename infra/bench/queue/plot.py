"""Load runs as a picture: seconds over rows, a line for each number of workers, as SVG without a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

WIDTH, HEIGHT, MARGIN = 640, 400, 60
COLOURS = ("#1f6f8b", "#c8553d", "#588157", "#6a4c93")


def plot(runs: Sequence[Mapping[str, Any]]) -> str:
    """Seconds from the plan's end to the last commit, and CPU seconds of the whole job layer, over rows."""
    lines = []
    ordered = sorted(runs, key=lambda run: (run["workers"], run["rows"]))
    for workers, group in groupby(ordered, key=lambda run: run["workers"]):
        several = list(group)
        points = [(run["rows"], run["wall_seconds"]["run"]) for run in several]
        lines.append((f"seconds, {workers} worker{'s' if workers > 1 else ''}", points, ""))
        cpu = [(run["rows"], run["cpu_us_a_row"]["sum"] * run["rows"] / 1e6) for run in several]
        lines.append((f"CPU seconds, {workers} worker{'s' if workers > 1 else ''}", cpu, "6 4"))
    return _svg(lines)


def _svg(lines: Sequence[tuple[str, Sequence[tuple[float, float]], str]]) -> str:
    most_x = max(x for _, points, _ in lines for x, _ in points)
    most_y = max(y for _, points, _ in lines for _, y in points) or 1.0

    def place(x: float, y: float) -> str:
        across = MARGIN + x / most_x * (WIDTH - 2 * MARGIN)
        down = HEIGHT - MARGIN - y / most_y * (HEIGHT - 2 * MARGIN)
        return f"{across:.1f},{down:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<polyline fill="none" stroke="#888" points="{place(0, most_y)} {place(0, 0)} {place(most_x, 0)}"/>',
        _text(MARGIN, HEIGHT - MARGIN + 18, "0"),
        _text(WIDTH - MARGIN, HEIGHT - MARGIN + 18, f"{most_x:,.0f} rows", "end"),
        _text(MARGIN - 6, MARGIN + 4, f"{most_y:.0f} s", "end"),
    ]
    for number, (name, points, dashes) in enumerate(lines):
        colour = COLOURS[number // 2 % len(COLOURS)]
        spots = [place(x, y) for x, y in points]
        style = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
        parts.append(f'<polyline fill="none" {style} points="{place(0, 0)} {" ".join(spots)}"/>')
        for spot in spots:
            across, down = spot.split(",")
            parts.append(f'<circle cx="{across}" cy="{down}" r="3" fill="{colour}"/>')
        y = 24 + 16 * number
        parts.append(f'<line {style} x1="{MARGIN + 20}" x2="{MARGIN + 50}" y1="{y}" y2="{y}"/>')
        parts.append(_text(MARGIN + 58, y + 4, name))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'
