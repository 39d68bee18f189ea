"""Which rows of a step begin with the same blocks of memory, and how many of them.

Knows block tables only: who made rows share blocks, and why, is nothing to it. Made for every step, so it works on
arrays of all rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """rows: two or more. blocks: how many the tables of all of them have in common from their beginning."""

    rows: npt.NDArray[np.int64]
    blocks: int


def shared_prefixes(tables: Ints, starts: Ints, counts: Ints, at_least: int, together: int) -> list[SharedPrefix]:
    """Puts rows into groups, each row into one at most.

    tables: block ids of all rows, one table after another. starts: where in it each row's table begins. counts: how
    many blocks of each row may be shared. at_least: fewer common blocks than this make no group. together: rows that
    read shared blocks once; more of them read once for each so many.

    Tables share prefixes as a tree does. A part of it is one group, or is cut where its rows have least in common,
    by which of the two reads fewer blocks.
    """
    rows = np.flatnonzero(counts >= at_least)
    _, which, times = np.unique(tables[starts[rows]], return_inverse=True, return_counts=True)
    rows = rows[times[which] > 1]
    if not len(rows):
        return []
    heads = _heads(tables, starts[rows], counts[rows])
    # Rows whose heads have a prefix in common are neighbours in any order that compares from the first on.
    order = np.argsort(heads.view(np.dtype((np.void, heads.itemsize * heads.shape[1]))).ravel(), kind="stable")
    heads, rows = heads[order], rows[order]
    differ = heads[1:] != heads[:-1]
    common = np.where(differ.any(1), differ.argmax(1), heads.shape[1])
    common[common < at_least] = 0
    return [SharedPrefix(rows[a:b], depth) for a, b, depth in _cut(common, together)]


def _heads(tables: Ints, starts: Ints, counts: Ints) -> Ints:
    """The blocks of each row that may be shared [rows, most of them]; what is missing differs from row to row."""
    column = np.arange(counts.max())
    places = np.minimum(starts[:, None] + column, len(tables) - 1)
    nothing = -1 - np.arange(len(starts), dtype=tables.dtype)[:, None]
    return np.ascontiguousarray(np.where(column < counts[:, None], tables[places], nothing))


def _cut(common: Ints, together: int) -> list[tuple[int, int, int]]:
    """Groups as (first row, row behind the last, common blocks); common[i] is what rows i and i + 1 share."""
    groups = []
    parts = [(0, len(common) + 1)]
    while parts:
        start, stop = parts.pop()
        inside = common[start : stop - 1]
        depth = int(inside.min())
        edges = start + np.concatenate([[0], np.flatnonzero(inside == depth) + 1, [stop - start]])
        smaller = [(int(a), int(b)) for a, b in zip(edges[:-1], edges[1:], strict=True) if b - a > 1]
        below = sum(_saved(b - a, int(common[a : b - 1].min()), together) for a, b in smaller)
        if depth and _saved(stop - start, depth, together) >= below:
            groups.append((start, stop, depth))
        else:
            parts += smaller
    return groups


def _saved(rows: int, depth: int, together: int) -> int:
    """Blocks that a group does not read: all but one row's of each so many."""
    return (rows - -(-rows // together)) * depth
