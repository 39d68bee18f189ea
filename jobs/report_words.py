"""The report's figures as people read them: every length of time with its units, every number short enough.

This room knows numbers and sentences, and may not know how they are laid out.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from pagemill.jobs.render import harmless

LONGEST_EXACT = 100_000_000  # with more digits than this has, a figure is wider than its tile on a phone
LONGEST_TEXT = 240
DAY_S, HOUR_S, MINUTE_S = 86400, 3600, 60


def short(value: float) -> str:
    """A number as an axis has it: 950, 1.5k, 20M."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.4g}{letter}"
    return f"{value:.3g}"


def count(number: int) -> str:
    """A whole number: exact as long as that can be read at a glance."""
    return f"{number:,}" if number < LONGEST_EXACT else short(number)


def rows(number: float) -> str:
    """1 row, 2 rows, 0.143 rows: a whole number, or one to three places."""
    told = (
        f"{number:,}" if isinstance(number, int) else f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
    )
    return f"{told} row{'' if told == '1' else 's'}"


def length(seconds: float) -> str:
    """A length of time by its two largest units: 380 ms, 4.2 s, 42 s, 3 min 5 s, 2 h, 9 d 6 h.

    A report is read where nothing else says whether 3:05 are minutes or hours.
    """
    if seconds < 0.9995:
        return f"{max(0.0, seconds) * 1000:.0f} ms" if seconds > 0 else "0 s"
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    if whole < MINUTE_S:
        return f"{whole} s"
    if whole < HOUR_S:
        return _two(whole, MINUTE_S, "min", 1, "s")
    if whole < DAY_S:
        return _two(whole, HOUR_S, "h", MINUTE_S, "min")
    return _two(whole, DAY_S, "d", HOUR_S, "h")


def _two(seconds: int, large: int, large_name: str, small: int, small_name: str) -> str:
    whole, rest = divmod(seconds, large)
    return f"{whole:,} {large_name}" + (f" {rest // small} {small_name}" if rest >= small else "")


def elapsed(step: float) -> Callable[[float], str]:
    """How an axis with a mark every `step` seconds writes its marks: all in one unit, which it names."""
    for unit, least, name in ((DAY_S, DAY_S, "d"), (HOUR_S, HOUR_S / 2, "h"), (MINUTE_S, MINUTE_S, "min")):
        if step >= least:
            return lambda seconds: f"{seconds / unit:,.4g} {name}" if seconds else "0"
    return lambda seconds: f"{seconds:g} s" if seconds else "0"


def money(amount: float) -> str:
    if amount >= LONGEST_EXACT:
        return short(amount)
    return f"{amount:,.0f}" if amount >= 1e5 else f"{amount:,.2f}" if amount >= 0.1 else f"{amount:.2g}"


def percent(part: int, whole: int) -> str:
    """A share of something, never told as none or all where it is neither; empty where there is nothing."""
    if not whole or part in (0, whole):
        return "" if not whole else "100%" if part else "0%"
    share = part / whole
    return "< 0.01%" if share < 0.0001 else "> 99.99%" if 0.9999 < share < 1 else f"{share:.2%}"


def pace(number: int, seconds: int) -> str:
    return f"{number / seconds:,.0f} a second" if seconds else ""


def share_name(share: float) -> str:
    return "median" if share == 0.5 else f"p{share * 100:g}"


def moment(seconds: float) -> str:
    """In UTC, without saying so."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def foreign(text: str) -> str:
    """What a row's failure said: on one line, without signs that turn the line around, and cut to length."""
    text = harmless(text)
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
