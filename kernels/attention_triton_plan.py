"""The work of attention on a CUDA device in one step, as records of integers.

Rows of one token (decode) are cut into splits of SPLIT keys, counted from a row's first key: an item is one
split of one row, or of several rows that begin with the same blocks, and how a row's sums are ordered is the
same in both. Rows of more tokens are cut into tiles. Knows lengths and tables, and nothing of tensors.

Records of int32, as attention_triton_kernel.py reads them:

    item [4]: first row, number of rows, split, unused
    row  [8]: token (its place in the packed matrix), length, where its table begins, first split that it
              sees, number of splits from there, its first part in scratch memory, two unused
    tile [4]: first token, number of tokens, position of the first, where the row's table begins

Rows are ordered so that those of an item lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import chain

import numpy as np
import numpy.typing as npt

from pagemill.kernels.cache_write import BLOCK_SIZE
from pagemill.kernels.packed_rows import PackedRows
from pagemill.kernels.shared_prefix import Int64s, shared_prefixes

Int32s = npt.NDArray[np.int32]

# Keys of a split. Fixed, so that a row's sums have one order whatever the batch; small, because a common
# prefix is shared by whole splits; the parts of a row cost 2 / SPLIT * group of what reading its keys does.
SPLIT = 256
SPLIT_BLOCKS = SPLIT // BLOCK_SIZE
# Rows of a tile (tokens times query heads of a kv head) that an item of one row or few has: the least that a
# matrix product of 16-bit numbers takes.
SMALL_TILE = 16
# A window that hides nothing: the largest int32 from which a length may be taken.
NO_WINDOW = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many of each there are, or may be at most: a captured graph fixes them, and its grids with them."""

    small_items: int
    large_items: int
    rows: int
    tiles: int
    parts: int
    table_blocks: int

    def hold(self, other: Sizes) -> bool:
        return all(getattr(self, part.name) >= getattr(other, part.name) for part in fields(self))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, for one window and one number of query heads a kv head."""

    small_items: Int32s
    large_items: Int32s
    rows: Int32s
    tiles: Int32s
    parts: int
    tables: Int32s

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            len(self.small_items),
            len(self.large_items),
            len(self.rows),
            len(self.tiles),
            self.parts,
            len(self.tables),
        )


def plan_step(rows: PackedRows, group: int, window: int | None, run_rows: int, large_rows: int) -> StepPlan:
    """group: query heads of a kv head. run_rows: rows of a tile of a run of tokens. large_rows: of an item of
    more rows than SMALL_TILE holds."""
    tables = np.fromiter(chain.from_iterable(rows.block_tables), np.int32)
    widths = np.array([len(table) for table in rows.block_tables], np.int64)
    new = np.array(rows.query_lengths, np.int64)
    lengths = np.array(rows.lengths, np.int64)
    token, place = np.cumsum(new) - new, np.cumsum(widths) - widths
    single = (new == 1) & (not rows.as_runs)
    decoding = np.flatnonzero(single)
    records = np.zeros((len(decoding), 8), np.int32)
    records[:, 0], records[:, 1], records[:, 2] = token[decoding], lengths[decoding], place[decoding]
    first = np.maximum(0, lengths[decoding] - (window or NO_WINDOW)) // SPLIT
    records[:, 3], records[:, 4] = first, -(-lengths[decoding] // SPLIT) - first
    packs = _packs(rows, tables, records, large_rows // group)
    records = records[packs.order]
    # A row of one split writes its output at once and needs no part.
    parts = np.where(records[:, 4] > 1, records[:, 4], 0).astype(np.int64)
    records[:, 5] = np.cumsum(parts) - parts
    items = _longest_first(_items(records, packs), records)
    large = items[:, 1] * group > SMALL_TILE
    return StepPlan(
        np.ascontiguousarray(items[~large]),
        np.ascontiguousarray(items[large]),
        records,
        _tiles(np.flatnonzero(~single), new, lengths, token, place, window, run_rows // group),
        int(parts.sum()),
        tables,
    )


@dataclass(frozen=True, slots=True)
class Packs:
    """Rows that have splits in common, put first.

    order: of all rows. starts, counts: the rows of each pack in that order. begins, ends: splits that they
    have in common and all see.
    """

    order: Int64s
    starts: Int64s
    counts: Int64s
    begins: Int64s
    ends: Int64s


def _packs(rows: PackedRows, tables: Int32s, records: Int32s, together: int) -> Packs:
    none = np.zeros(0, np.int64)
    everyone = np.arange(len(records), dtype=np.int64)
    if not rows.share_prefixes or len(records) < 2 or together < 2:
        return Packs(everyone, none, none, none, none)
    whole = records[:, 1].astype(np.int64) // SPLIT * SPLIT_BLOCKS
    found = shared_prefixes(tables, records[:, 2].astype(np.int64), whole, SPLIT_BLOCKS, together)
    pieces = -(-found.counts // together)
    group = np.repeat(np.arange(len(pieces)), pieces)
    counts = found.counts[group] // pieces[group]
    # What is left over goes to the first pieces, one row each.
    number = np.arange(len(group)) - (np.cumsum(pieces) - pieces)[group]
    counts += number < found.counts[group] % pieces[group]
    starts = np.cumsum(counts) - counts
    alone = np.ones(len(records), bool)
    alone[found.rows] = False
    order = np.concatenate([found.rows, np.flatnonzero(alone)])
    begins = none if not len(starts) else np.maximum.reduceat(records[found.rows, 3].astype(np.int64), starts)
    ends = found.blocks[group] // SPLIT_BLOCKS
    useful = (counts > 1) & (begins < ends)
    return Packs(order, starts[useful], counts[useful], begins[useful], ends[useful])


def _items(records: Int32s, packs: Packs) -> Int32s:
    """Those of packs, then what is left to each row: splits before and behind what its pack has in common."""
    shared = packs.ends - packs.begins
    left_begin = records[:, 3].astype(np.int64)
    left_end = left_begin + records[:, 4]
    inside = np.repeat(packs.starts, packs.counts) + _counted(packs.counts)
    hole_begin, hole_end = left_end.copy(), left_end.copy()
    hole_begin[inside], hole_end[inside] = (
        np.repeat(packs.begins, packs.counts),
        np.repeat(packs.ends, packs.counts),
    )
    everyone = np.arange(len(records), dtype=np.int64)
    ones = np.ones(len(records), np.int64)
    parts = [
        _runs(packs.starts, packs.counts, packs.begins, shared),
        _runs(everyone, ones, left_begin, hole_begin - left_begin),
        _runs(everyone, ones, hole_end, left_end - hole_end),
    ]
    return np.concatenate(parts).astype(np.int32)


def _runs(first_rows: Int64s, counts: Int64s, begins: Int64s, splits: Int64s) -> Int64s:
    """An item for each of so many splits."""
    items = np.zeros((int(splits.sum()), 4), np.int64)
    items[:, 0], items[:, 1] = np.repeat(first_rows, splits), np.repeat(counts, splits)
    items[:, 2] = np.repeat(begins, splits) + _counted(splits)
    return items


def _counted(lengths: Int64s) -> Int64s:
    """0, 1, 2 … anew for each of several runs."""
    return np.arange(lengths.sum(), dtype=np.int64) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _longest_first(items: Int32s, records: Int32s) -> Int32s:
    """The last split of a row may be short: it is done when there is little else left."""
    keys = np.minimum(records[items[:, 0], 1] - items[:, 2] * SPLIT, SPLIT)
    return items[np.argsort(-keys, kind="stable")]


def _tiles(
    chunked: Int64s,
    new: Int64s,
    lengths: Int64s,
    token: Int64s,
    place: Int64s,
    window: int | None,
    most: int,
) -> Int32s:
    """Runs of at most `most` tokens of the rows in `chunked`, those with most keys first."""
    counts = -(-new[chunked] // most)
    row = np.repeat(chunked, counts)
    begin = _counted(counts) * most
    tiles = np.zeros((len(row), 4), np.int32)
    tiles[:, 0], tiles[:, 1] = token[row] + begin, np.minimum(most, new[row] - begin)
    tiles[:, 2], tiles[:, 3] = lengths[row] - new[row] + begin, place[row]
    keys = np.minimum(tiles[:, 2], window or NO_WINDOW)
    return tiles[np.argsort(-keys, kind="stable")]
