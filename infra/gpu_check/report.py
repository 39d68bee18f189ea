"""The table for people and the record for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpu_check.record import Check, Figure, Findings


def table(found: Mapping[str, Findings], titles: Mapping[str, str], *, dry: bool) -> str:
    lines = []
    for name, findings in found.items():
        lines += ["", f"{titles[name]} ({findings.seconds:.0f} s)"]
        if findings.checks:
            lines.append(_checked(findings.checks))
        lines += [f"  WRONG  {check.name}: {check.detail}" for check in findings.checks if not check.ok]
        lines += _figures(findings.figures, dry=dry)
        if findings.error:
            lines.append(f"  ERROR  {findings.error}")
    return "\n".join([*lines, "", verdict(found, dry=dry)])


def _checked(checks: Iterable[Check]) -> str:
    checks = list(checks)
    right = [check for check in checks if check.ok]
    errors = [check for check in right if check.error is not None]
    line = f"  {len(right)} of {len(checks)} checks right"
    if errors:
        worst = max(errors, key=lambda check: check.error or 0.0)
        line += f"; the nearest to its tolerance used {100 * (worst.error or 0):.0f} % of it: {worst.name}"
    return line


def _figures(figures: Iterable[Figure], *, dry: bool) -> list[str]:
    figures = list(figures)
    width = max((len(figure.name) for figure in figures), default=0)
    return [_figure(figure, width, dry=dry) for figure in figures]


def _figure(figure: Figure, width: int, *, dry: bool) -> str:
    parts = [f"  {figure.name:{width}}  {_number(figure.value):>9} {figure.unit:8}"]
    parts.append(f"{figure.ms:10.3f} ms" if figure.ms is not None else " " * 13)
    if figure.share is not None:
        share = f"{100 * figure.share:.1f} %" if figure.share < 1.995 else f"{figure.share:.2f} x"
        parts.append(f"{share:>8} of {figure.of}")
    if figure.mark is not None:
        word = "at most" if figure.at_most else "at least"
        mark = f"{100 * figure.mark:.0f} %" if figure.mark <= 1 else f"{figure.mark:g} x"
        met = "" if dry or figure.met is None else " met" if figure.met else " BELOW"
        parts.append(f"[{word} {mark}:{met}]" if met else f"[{word} {mark}]")
    if figure.detail:
        parts.append(figure.detail)
    return " ".join(parts).rstrip()


def _number(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def verdict(found: Mapping[str, Findings], *, dry: bool) -> str:
    checks = [check for findings in found.values() for check in findings.checks]
    marks = [f.met for findings in found.values() for f in findings.figures if f.met is not None]
    broken = [name for name, findings in found.items() if findings.error]
    wrong = sum(not check.ok for check in checks)
    words = [f"{len(checks)} checks, {wrong} wrong"]
    words.append(f"{len(broken)} parts not done" + (f" ({', '.join(broken)})" if broken else ""))
    if dry:
        words.append("a rehearsal: no mark is looked at")
    else:
        words.append(f"{sum(marks)} of {len(marks)} marks met")
    return "; ".join(words)


def save(path: Path, head: Mapping[str, Any], found: Mapping[str, Findings]) -> None:
    ok = all(findings.ok for findings in found.values())
    record = {**head, "ok": ok, "parts": {name: findings.record() for name, findings in found.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
