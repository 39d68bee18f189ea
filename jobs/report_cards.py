"""Pieces of HTML that the report's rooms share: a card, and what stands in it without a figure.

This room may not know any figure.
"""

from __future__ import annotations

from html import escape


def section(title: str, inner: str, said: str = "") -> str:
    """A card.  inner, said: HTML; `said` stands under the title."""
    told = f'<p class="note">{said}</p>' if said else ""
    return f"<section><h2>{escape(title)}</h2>{told}{inner}</section>"


def note(sentence: str) -> str:
    return f'<p class="note">{escape(sentence)}</p>'


def key(series: str, name: str) -> str:
    """What a colour stands for.  series: its CSS class."""
    return f'<span class="key {series}"></span>{escape(name)}'


def none(sentence: str) -> str:
    """Said in place of what there is none of."""
    return f'<p class="none">{escape(sentence)}</p>'
