"""Which rows of a step begin with the same blocks of memory, and how many of them.

Knows block tables only: who made rows share blocks, and why, is nothing to it. Made for every step, so it
works on arrays of all rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of two rows or more, one behind another.

    rows: all of their rows. counts: how many of them are in each group. blocks: how many the tables of a
    group have in common from their beginning.
    """

    rows: Int64s
    counts: Int64s
    blocks: Int64s


def shared_prefixes(tables: Ints, starts: Ints, counts: Ints, at_least: int, together: int) -> SharedPrefixes:
    """Puts rows into groups, each row into one at most.

    tables: block ids of all rows, one table after another. starts: where in it each row's table begins.
    counts: how many blocks of each row may be shared. at_least: fewer common blocks than this make no group.
    together: rows that read shared blocks once; more of them read once for each so many.

    Tables share prefixes as a tree does. A part of it is one group, or is cut where its rows have least in
    common, by which of the two reads fewer blocks.
    """
    rows = np.flatnonzero(counts >= at_least)
    _, which, times = np.unique(tables[starts[rows]], return_inverse=True, return_counts=True)
    rows = rows[times[which] > 1]
    if not len(rows):
        return SharedPrefixes(rows, rows, rows)
    heads = _heads(tables, starts[rows], counts[rows])
    # Rows whose heads have a prefix in common are neighbours in any order that compares from the first on.
    order = np.argsort(
        heads.view(np.dtype((np.void, heads.itemsize * heads.shape[1]))).ravel(), kind="stable"
    )
    heads, rows = heads[order], rows[order]
    differ = heads[1:] != heads[:-1]
    common = np.where(differ.any(1), differ.argmax(1), heads.shape[1])
    common[common < at_least] = 0
    groups = _cut(common, together)
    members: Int64s = np.concatenate([rows[inside] for inside, _ in groups] or [rows[:0]])
    counts_found = np.array([len(inside) for inside, _ in groups], np.int64)
    return SharedPrefixes(members, counts_found, np.array([depth for _, depth in groups], np.int64))


def _heads(tables: Ints, starts: Ints, counts: Ints) -> Ints:
    """The blocks of each row that may be shared [rows, most of them]; what is missing differs from row to
    row."""
    column = np.arange(counts.max())
    places = np.minimum(starts[:, None] + column, len(tables) - 1)
    nothing = -1 - np.arange(len(starts), dtype=tables.dtype)[:, None]
    return np.ascontiguousarray(np.where(column < counts[:, None], tables[places], nothing))


def _cut(common: Ints, together: int) -> list[tuple[Int64s, int]]:
    """Groups as their rows and common blocks; common[i] is what rows i and i + 1 share."""
    groups = []
    parts = [(0, len(common) + 1)]
    while parts:
        start, stop = parts.pop()
        inside = common[start : stop - 1]
        depth = int(inside.min())
        smaller = _smaller(inside, depth, start)
        # Rows between pieces have so much in common with each other, too.
        left = stop - start - sum(b - a for a, b, _, _ in smaller)
        below = sum(_saved(b - a, least, together) for a, b, least, _ in smaller) + _saved(
            left, depth, together
        )
        if depth and _saved(stop - start, depth, together) >= below:
            groups.append((np.arange(start, stop), depth))
            continue
        if depth and left > 1:
            pieces = [np.arange(a, b) for a, b, _, _ in smaller]
            groups.append((np.setdiff1d(np.arange(start, stop), np.concatenate(pieces)), depth))
        groups += [(np.arange(a, b), least) for a, b, least, most in smaller if least == most]
        parts += [(a, b) for a, b, least, most in smaller if least < most]
    return groups


def _smaller(inside: Ints, depth: int, start: int) -> list[tuple[int, int, int, int]]:
    """What is left of a part where it is cut at all places of least depth: each piece of two rows or more as
    first row, row behind the last, least and most that neighbours in it have in common."""
    deeper = np.concatenate([[False], inside > depth, [False]])
    edges = np.flatnonzero(deeper[1:] != deeper[:-1])
    if not len(edges):
        return []
    inside = np.append(inside, depth)
    least, most = (f.reduceat(inside, edges)[::2] for f in (np.minimum, np.maximum))
    # Every other stretch lies between pieces.
    first, past = edges[::2] + start, edges[1::2] + start + 1
    return list(zip(first.tolist(), past.tolist(), least.tolist(), most.tolist(), strict=True))


def _saved(rows: int, depth: int, together: int) -> int:
    """Blocks that a group does not read: all but one row's of each so many."""
    return (rows - -(-rows // together)) * depth
