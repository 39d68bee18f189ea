"""What attention's compiled part and its caller agree upon: sizes, and the words of the parameter block.

Numbers only: the caller may read them without numba.
"""

from __future__ import annotations

LINE = 64  # bytes of a cache line, and of 16 float32

# Keys are summed up in splits of 256, at the same places for every query.
SPLIT_BLOCKS = 16
# One row of scores: a split, and a line more, lest the rows of a tile fall on the same cache sets.
SCORE_BYTES = (SPLIT_BLOCKS + 1) * LINE
# Rows of a register tile: 6 rows of 16 sums fill 12 of the 16 registers of AVX2.
TILE_ROWS = 6
# Blocks of keys that meet a register tile together where there are registers for it: with 32 of 16 numbers
# each, 24 sums keep multipliers busy that take six cycles for one, and a query's number is read once for all.
WIDE = 4

# Words of the parameter block, int64 each. The first two are counted up by threads and so lie on cache
# lines of their own, apart from what all threads only read.
ITEM, THREAD = 0, 8
(
    ITEMS,  # how many items there are
    ITEM_LIST,  # [items, 8] int64, see below
    TILE_LIST,  # [tiles, 8] int64, see below
    SCRATCH,
    SCRATCH_BYTES,  # of one thread
    SUMS,  # offsets into a thread's scratch; its queries lie at 0
    SCORES,
    MAXIMA,
    TOTALS,
    QUERY,  # address, and bytes from token to token and from head to head
    QUERY_TOKEN,
    QUERY_HEAD,
    OUT,  # the same
    OUT_TOKEN,
    OUT_HEAD,
    HALF,  # whether query and out are bfloat16
    LAYER,  # address, and bytes from block to block, from keys to values and from head to head
    BLOCK_BYTES,
    VALUES,
    HEAD_BYTES,
    GROUP,  # query heads of a kv head
    HEAD_DIM,
    TABLES,  # int32
    SCALE,  # float32 in the low half of the word
    SOFTCAP,
    WINDOW,
    PACKED,  # offset into a thread's scratch of one head's keys or values of a block, in pairs
) = range(16, 43)
WORDS = 48
# Those that depend on how a step is cut, and not on a layer's tensors.
OF_A_PLAN = (
    ITEMS, ITEM_LIST, TILE_LIST, SCRATCH, SCRATCH_BYTES, SUMS, SCORES, MAXIMA, TOTALS, GROUP, HEAD_DIM,
    TABLES, WINDOW, PACKED,
)  # fmt: skip

# Words of an item: a tile, or several of one token each that share their first blocks.
(
    ITEM_TILE,  # its first tile, and how many follow one another
    ITEM_TILES,
    ITEM_HEAD,  # its first kv head, and how many
    ITEM_HEADS,
    ITEM_BEGIN,  # the first block that any tile sees something of
    ITEM_COMMON,  # blocks before this one are the same in all of its tables; 0 if there is one tile
    ITEM_ROWS,  # scratch rows of a kv head, of all tiles: whole register tiles, what lies between is ignored
) = range(7)
ITEM_WORDS = 8

# Words of a tile: a run of a row's tokens.
(
    TILE_TOKEN,  # place of its first token in query and out
    TILE_TOKENS,
    TILE_POSITION,  # of its first token in the row
    TILE_LENGTH,  # of the row
    TILE_PLACE,  # where the row's table begins in TABLES
    TILE_ROW,  # its first scratch row in each kv head
) = range(6)
TILE_WORDS = 8


def small_rows(group: int) -> int:
    """Rows of the register tile for one token with `group` query heads: as few tiles as do, of like size."""
    tiles = -(-group // TILE_ROWS)
    return -(-group // tiles)
