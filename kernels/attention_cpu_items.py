"""Cuts a step into items for attention on CPU, the longest first.

An item is a tile of one row (a run of its tokens) with one or more kv heads, or the tiles of several rows
that begin with the same blocks. Knows lengths and tables, and nothing of tensors. How work is cut changes no
bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagemill.kernels import attention_cpu_words as words
from pagemill.kernels.cache_write import BLOCK_SIZE
from pagemill.kernels.packed_rows import PackedRows
from pagemill.kernels.shared_prefix import SharedPrefixes, shared_prefixes

Int64s = npt.NDArray[np.int64]

NO_WINDOW = 1 << 40
# Queries of a prefill item, times query heads of a kv head: enough that a block of keys fetched once is
# used many times, few enough that scores stay in a core's cache and that short prompts yield many items.
PREFILL_ROWS = 48
# The same of an item of several rows.
SHARED_ROWS = 48
# Fewer blocks in common than these are left to each row.
SHARED_BLOCKS = 4
# Nor are they shared if they are less than one part in so many of what the rows see: an item of several rows
# reads what is their own a little slower (64 rows with 128 tokens in common and 200 of their own lose 4 %).
SHARED_PART = 2
# Bytes of keys that a decode item reads at one place, if there are rows enough for all threads: memory
# streams adjacent heads faster than scattered ones (13 against 11 GB/s on one core of an EPYC 7003).
DECODE_BYTES = 16 << 10
# Items a thread should find at least before heads are taken together, and before rows are.
ITEMS_A_THREAD = 8
SHARED_ITEMS_A_THREAD = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """group: query heads of a kv head. kv_bytes: of one number in memory."""

    group: int
    kv_heads: int
    head_dim: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Packs:
    """Tiles that make one item together, one pack behind another.

    tiles: their numbers. counts: how many of them are in each pack. common: how many blocks a pack has in
    common. heads: kv heads of an item.
    """

    tiles: Int64s
    counts: Int64s
    common: Int64s
    heads: int


NOTHING = np.zeros(0, np.int64)
NO_PACKS = Packs(NOTHING, NOTHING, NOTHING, 1)


def plan_items(
    rows: PackedRows, tables: npt.NDArray[np.int32], shape: Shape, window: int, threads: int
) -> tuple[Int64s, Int64s, int]:
    """Items [items, ITEM_WORDS], tiles [tiles, TILE_WORDS], and the scratch rows that the largest item
    needs."""
    tiles = _tiles(rows, shape.group)
    packs = _packs(rows, tables, tiles, shape, window, threads)
    alone = np.ones(len(tiles), bool)
    alone[packs.tiles] = False
    tiles = tiles[np.concatenate([packs.tiles, np.flatnonzero(alone)])]
    items = np.concatenate(
        [
            _shared(tiles, packs, shape, window),
            _alone(tiles, len(packs.tiles), shape, window, threads),
        ]
    )
    longest_first = np.argsort(-_costs(tiles, items, window), kind="stable")
    return np.ascontiguousarray(items[longest_first]), tiles, _scratch_rows(items)


def starts_of(lengths: Int64s) -> Int64s:
    """Where each of several runs begins, one behind another."""
    return np.cumsum(lengths) - lengths


def _tiles(rows: PackedRows, group: int) -> Int64s:
    """Runs of tokens [tiles, TILE_WORDS]."""
    new = np.array(rows.query_lengths, np.int64)
    length = np.array(rows.lengths, np.int64)
    most = max(1, PREFILL_ROWS // group)
    counts = -(-new // most)
    row = np.repeat(np.arange(len(new)), counts)
    begin = (np.arange(len(row)) - starts_of(counts)[row]) * most
    tiles = np.zeros((len(row), words.TILE_WORDS), np.int64)
    tiles[:, words.TILE_TOKEN] = starts_of(new)[row] + begin
    tiles[:, words.TILE_TOKENS] = np.minimum(most, new[row] - begin)
    tiles[:, words.TILE_POSITION] = length[row] - new[row] + begin
    tiles[:, words.TILE_LENGTH] = length[row]
    tiles[:, words.TILE_PLACE] = _places(rows)[row]
    return tiles


def _heights(tiles: Int64s, group: int) -> Int64s:
    """Scratch rows of each tile and kv head: whole register tiles."""
    tokens = tiles[:, words.TILE_TOKENS]
    register = np.where(tokens == 1, words.small_rows(group), words.TILE_ROWS)
    return _rounded(tokens * group, register)


def _rounded(rows: Int64s, register: Int64s | int) -> Int64s:
    return -(-rows // register) * register


def _places(rows: PackedRows) -> Int64s:
    return starts_of(np.array([len(table) for table in rows.block_tables], np.int64))


def _first_blocks(tiles: Int64s, window: int) -> Int64s:
    return np.maximum(0, tiles[:, words.TILE_POSITION] - window + 1) // BLOCK_SIZE


def _packs(
    rows: PackedRows,
    tables: npt.NDArray[np.int32],
    tiles: Int64s,
    shape: Shape,
    window: int,
    threads: int,
) -> Packs:
    """Decoding tiles that begin with the same blocks."""
    decoding = np.flatnonzero(tiles[:, words.TILE_TOKENS] == 1)
    if not rows.share_prefixes or len(decoding) < 2:
        return NO_PACKS
    most, heads = _together(shape, len(decoding), threads)
    found = rows.once(("prefixes", most), lambda: _prefixes(tables, tiles[decoding], most))
    if not len(found.counts):
        return NO_PACKS
    pieces = -(-found.counts // most)
    group = np.repeat(np.arange(len(pieces)), pieces)
    counts = found.counts[group] // pieces[group]
    # What is left over goes to the first pieces, one row each.
    counts += np.arange(len(group)) - starts_of(pieces)[group] < found.counts[group] % pieces[group]
    common, members = found.blocks[group], decoding[found.rows]
    keep = _worthwhile(tiles[members], counts, common, shape, window)
    return Packs(members[np.repeat(keep, counts)], counts[keep], common[keep], heads)


def _worthwhile(
    members: Int64s, counts: Int64s, common: Int64s, shape: Shape, window: int
) -> npt.NDArray[np.bool_]:
    """Which packs of tiles, one pack behind another, are better read together."""
    starts = starts_of(counts)
    first = _first_blocks(members, window)
    past = members[:, words.TILE_POSITION] // BLOCK_SIZE + 1
    seen_by_all = common - np.maximum.reduceat(first, starts)
    seen_by_any = common - np.minimum.reduceat(first, starts)
    in_all = np.add.reduceat(past - first, starts)
    rows = np.add.reduceat(_heights(members, shape.group), starts)
    return (
        # Fewer rows leave a register tile half empty.
        (rows >= words.TILE_ROWS)
        & (seen_by_all >= SHARED_BLOCKS)
        # Rows of other positions have other windows: one that sees little of what is shared would compute
        # most of it in vain.
        & (2 * seen_by_all >= seen_by_any)
        & (SHARED_PART * seen_by_all * counts >= in_all)
    )


def _together(shape: Shape, tokens: int, threads: int) -> tuple[int, int]:
    """How many rows an item takes at most, and how many kv heads."""
    register = words.small_rows(shape.group)
    height = -(-shape.group // register) * register
    least, most = max(2, -(-2 * words.TILE_ROWS // height)), max(2, SHARED_ROWS // height)
    heads = _heads_together(shape, tokens, threads)
    enough = SHARED_ITEMS_A_THREAD * threads
    if tokens * (shape.kv_heads // heads) < enough * most // 2:
        heads = 1
    return max(least, min(most, tokens * (shape.kv_heads // heads) // enough)), heads


def _prefixes(tables: npt.NDArray[np.int32], tiles: Int64s, together: int) -> SharedPrefixes:
    whole = tiles[:, words.TILE_LENGTH] // BLOCK_SIZE
    return shared_prefixes(tables, tiles[:, words.TILE_PLACE], whole, SHARED_BLOCKS, together)


def _shared(tiles: Int64s, packs: Packs, shape: Shape, window: int) -> Int64s:
    """Items of several tiles each, the first of all; gives these tiles their scratch rows."""
    items = _items(len(packs.counts), shape.kv_heads, packs.heads)
    if not len(items):
        return items
    starts = starts_of(packs.counts)
    members = tiles[: len(packs.tiles)]
    heights = _heights(members, shape.group)
    above = starts_of(heights)
    members[:, words.TILE_ROW] = above - np.repeat(above[starts], packs.counts)
    columns = {
        words.ITEM_TILE: starts,
        words.ITEM_TILES: packs.counts,
        words.ITEM_COMMON: packs.common,
        words.ITEM_BEGIN: np.minimum.reduceat(_first_blocks(members, window), starts),
        words.ITEM_ROWS: _rounded(np.add.reduceat(heights, starts), words.TILE_ROWS),
    }
    for column, values in columns.items():
        items[:, column] = np.repeat(values, shape.kv_heads // packs.heads)
    return items


def _alone(tiles: Int64s, shared: int, shape: Shape, window: int, threads: int) -> Int64s:
    """Items of one tile each, for those from number `shared` on."""
    number = np.arange(shared, len(tiles))
    decoding = tiles[shared:, words.TILE_TOKENS] == 1
    together = _heads_together(shape, int(decoding.sum()), threads)
    items = []
    for part, heads in ((number[decoding], together), (number[~decoding], 1)):
        some = _items(len(part), shape.kv_heads, heads)
        some[:, words.ITEM_TILE] = np.repeat(part, shape.kv_heads // heads)
        some[:, words.ITEM_TILES] = 1
        theirs = tiles[some[:, words.ITEM_TILE]]
        some[:, words.ITEM_BEGIN] = _first_blocks(theirs, window)
        some[:, words.ITEM_ROWS] = _heights(theirs, shape.group)
        items.append(some)
    return np.concatenate(items)


def _items(count: int, kv_heads: int, together: int) -> Int64s:
    """For each of so many, one item for each `together` kv heads."""
    parts = kv_heads // together
    items = np.zeros((count * parts, words.ITEM_WORDS), np.int64)
    items[:, words.ITEM_HEAD] = np.tile(np.arange(parts) * together, count)
    items[:, words.ITEM_HEADS] = together
    return items


def _heads_together(shape: Shape, tokens: int, threads: int) -> int:
    """How many kv heads a decode item takes: a divisor of all of them."""
    head_bytes = shape.head_dim * 16 * shape.kv_bytes
    wanted = max(1, DECODE_BYTES // head_bytes)
    fitting = [
        n
        for n in range(1, shape.kv_heads + 1)
        if shape.kv_heads % n == 0
        and n <= wanted
        and tokens * (shape.kv_heads // n) >= ITEMS_A_THREAD * threads
    ]
    return max(fitting, default=1)


def _costs(tiles: Int64s, items: Int64s, window: int) -> Int64s:
    """Keys times tokens times heads of each item."""
    tokens = tiles[:, words.TILE_TOKENS]
    own = tokens * np.minimum(tiles[:, words.TILE_POSITION] + tokens, window + tokens)
    before = np.concatenate([[0], np.cumsum(own)])
    first, count = items[:, words.ITEM_TILE], items[:, words.ITEM_TILES]
    costs: Int64s = (before[first + count] - before[first]) * items[:, words.ITEM_HEADS]
    return costs


def _scratch_rows(items: Int64s) -> int:
    """Those of the largest item, in whole register tiles."""
    most = (items[:, words.ITEM_ROWS] * items[:, words.ITEM_HEADS]).max()
    return -(-int(most) // words.TILE_ROWS) * words.TILE_ROWS
