"""Cuts a step into items for attention on CPU, the longest first.

An item is a tile of one row (a run of its tokens) with one or more kv heads, or the tiles of several rows that begin with
the same blocks. Knows lengths and tables, and nothing of tensors. How work is cut changes no bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagemill.kernels import attention_cpu_words as words
from pagemill.kernels.cache_write import BLOCK_SIZE
from pagemill.kernels.packed_rows import PackedRows
from pagemill.kernels.shared_prefix import SharedPrefix, shared_prefixes

Int64s = npt.NDArray[np.int64]

NO_WINDOW = 1 << 40
# Queries of a prefill item, times query heads of a kv head: enough that a block of keys fetched once is
# used many times, few enough that scores stay in a core's cache and that short prompts yield many items.
PREFILL_ROWS = 48
# The same of an item of several rows.
SHARED_ROWS = 48
# Fewer blocks in common than these are left to each row.
SHARED_BLOCKS = 4
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


def plan_items(
    rows: PackedRows, tables: npt.NDArray[np.int32], shape: Shape, window: int, threads: int
) -> tuple[Int64s, Int64s, int]:
    """Items [items, ITEM_WORDS], tiles [tiles, TILE_WORDS], and the scratch rows that the largest item needs."""
    tiles, row = _tiles(rows, shape.group)
    alone = np.ones(len(tiles), bool)
    parts = []
    for pack, common in _packs(rows, tables, tiles, row, shape, window, threads):
        alone[pack] = False
        heights = tiles[pack, words.TILE_HEIGHT]
        tiles[pack, words.TILE_ROW] = starts_of(heights)
        begin = _first_blocks(tiles[pack], window).min()
        parts.append((pack, common, begin, heights.sum()))
    order = np.concatenate([*(pack for pack, *_ in parts), np.flatnonzero(alone)])
    tiles = np.ascontiguousarray(tiles[order])
    shared = len(order) - int(alone.sum())
    items = [_alone(tiles, shared, shape, window, threads)]
    if parts:
        items.append(_shared(parts, shape.kv_heads))
    together = np.concatenate(items)
    cost = _costs(tiles, together, window)
    together = np.ascontiguousarray(together[np.argsort(-cost, kind="stable")])
    return together, tiles, _scratch_rows(together)


def starts_of(lengths: Int64s) -> Int64s:
    """Where each of several runs begins, one behind another."""
    return np.cumsum(lengths) - lengths


def _tiles(rows: PackedRows, group: int) -> tuple[Int64s, Int64s]:
    """Runs of tokens [tiles, TILE_WORDS], and the row of each."""
    new = np.array(rows.query_lengths, np.int64)
    length = np.array(rows.lengths, np.int64)
    most = max(1, PREFILL_ROWS // group)
    counts = -(-new // most)
    row = np.repeat(np.arange(len(new)), counts)
    begin = (np.arange(len(row)) - starts_of(counts)[row]) * most
    tokens = np.minimum(most, new[row] - begin)
    register = np.where(tokens == 1, words.small_rows(group), words.TILE_ROWS)
    tiles = np.zeros((len(row), words.TILE_WORDS), np.int64)
    tiles[:, words.TILE_TOKEN] = starts_of(new)[row] + begin
    tiles[:, words.TILE_TOKENS] = tokens
    tiles[:, words.TILE_POSITION] = length[row] - new[row] + begin
    tiles[:, words.TILE_LENGTH] = length[row]
    tiles[:, words.TILE_PLACE] = _places(rows)[row]
    tiles[:, words.TILE_HEIGHT] = -(-(tokens * group) // register) * register
    return tiles, row


def _places(rows: PackedRows) -> Int64s:
    return starts_of(np.array([len(table) for table in rows.block_tables], np.int64))


def _first_blocks(tiles: Int64s, window: int) -> Int64s:
    return np.maximum(0, tiles[:, words.TILE_POSITION] - window + 1) // BLOCK_SIZE


def _packs(
    rows: PackedRows,
    tables: npt.NDArray[np.int32],
    tiles: Int64s,
    row: Int64s,
    shape: Shape,
    window: int,
    threads: int,
) -> list[tuple[Int64s, int]]:
    """Decoding tiles that make one item, and how many blocks they have in common."""
    decoding = np.flatnonzero(tiles[:, words.TILE_TOKENS] == 1)
    if not rows.share_prefixes or len(decoding) < 2:
        return []
    height = int(tiles[decoding[0], words.TILE_HEIGHT])
    wanted = len(decoding) * shape.kv_heads // (SHARED_ITEMS_A_THREAD * threads)
    most = max(2, min(SHARED_ROWS // height, wanted))
    packs = []
    for prefix in rows.once(("prefixes", most), lambda: _prefixes(tables, tiles[decoding], most)):
        members = decoding[prefix.rows]
        for pack in np.array_split(members, -(-len(members) // most)):
            first = _first_blocks(tiles[pack], window)
            # Rows of other positions have other windows: a row that sees little of what is shared would compute
            # most of it in vain.
            seen = prefix.blocks - first.max()
            if seen >= SHARED_BLOCKS and 2 * seen >= prefix.blocks - first.min():
                packs.append((pack, prefix.blocks))
    return packs


def _prefixes(tables: npt.NDArray[np.int32], tiles: Int64s, together: int) -> list[SharedPrefix]:
    whole = tiles[:, words.TILE_LENGTH] // BLOCK_SIZE
    return shared_prefixes(tables, tiles[:, words.TILE_PLACE], whole, SHARED_BLOCKS, together)


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
        some[:, words.ITEM_BEGIN] = _first_blocks(tiles[some[:, words.ITEM_TILE]], window)
        some[:, words.ITEM_ROWS] = tiles[some[:, words.ITEM_TILE], words.TILE_HEIGHT]
        items.append(some)
    return np.concatenate(items)


def _shared(parts: list[tuple[Int64s, int, int, int]], kv_heads: int) -> Int64s:
    """Items of several tiles each, the first of all."""
    items = _items(len(parts), kv_heads, 1)
    counts = np.array([len(pack) for pack, *_ in parts], np.int64)
    columns = (words.ITEM_COMMON, words.ITEM_BEGIN, words.ITEM_ROWS)
    for column, values in zip(columns, list(zip(*parts, strict=True))[1:], strict=True):
        items[:, column] = np.repeat(np.array(values, np.int64), kv_heads)
    items[:, words.ITEM_TILE] = np.repeat(starts_of(counts), kv_heads)
    items[:, words.ITEM_TILES] = np.repeat(counts, kv_heads)
    return items


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
    until = np.concatenate([[0], np.cumsum(own)])
    first = items[:, words.ITEM_TILE]
    return (until[first + items[:, words.ITEM_TILES]] - until[first]) * items[:, words.ITEM_HEADS]


def _scratch_rows(items: Int64s) -> int:
    """Those of the largest item, in whole register tiles."""
    most = (items[:, words.ITEM_ROWS] * items[:, words.ITEM_HEADS]).max()
    return -(-int(most) // words.TILE_ROWS) * words.TILE_ROWS
