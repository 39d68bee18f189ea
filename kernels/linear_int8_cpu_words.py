"""What the compiled part of int8 linear layers and its caller agree upon: sizes, and words of parameters.

Numbers only: the caller may read them without numba.
"""

from __future__ import annotations

LINE = 64  # bytes of a cache line
PANEL = 16  # outputs that are computed together
# Rows that are computed together at most: 6 rows of 16 sums fill 12 of the 16 registers of AVX2. AVX-512 has
# 32 of twice the width, and it takes a dozen sums to keep its multipliers busy.
TILE_ROWS, WIDE_TILE_ROWS = 6, 12
# One thread's sums of a tile, and a line between them and another's.
SUMS_BYTES = (WIDE_TILE_ROWS + 1) * LINE
# A row whose numbers are all below this is zero: the inverse of its scale would overflow.
SMALLEST_ROW = 1e-30

# Rows of an item at most: as integers they fit a core's second-level cache.
ROWS_AN_ITEM = 96
# One thread's outputs of a gate's panel, until those of the other half come; and a line.
GATES_BYTES = (ROWS_AN_ITEM + 1) * LINE

# How many numbers of a row are multiplied and added by one instruction, and the bytes of each.
TOGETHER = {"words": 2, "bytes": 4}
BYTES = {"words": 2, "bytes": 1}

# Words of the parameter block, int64 each. The first four are counted up by threads and so lie on cache
# lines of their own, apart from what all threads only read.
ROW, THREAD, ITEM, THREAD_2 = 0, 8, 16, 24
(
    ROWS,
    WIDTH,  # numbers of a row
    BLOCK,  # of them rotated together
    X,  # address, and bytes from row to row
    X_ROW,
    OUT,  # the same
    OUT_ROW,
    SCRATCH,  # float32 [width] of a thread
    SCRATCH_BYTES,
    SUMS,  # int32 [rows of a tile, 16] of a thread
    GATES,  # [rows of an item, 16] of a thread, as outputs are
    VALUES,  # the rows as integers, and bytes from row to row
    VALUES_ROW,
    ROW_SCALES,  # float32 [rows]
    PANELS,  # how many panels of weights, two of a gated pair counted as one, and where
    PANEL_LIST,
    SCALES,  # float32 [panels * 16]
    OFFSETS,  # int32 [panels * 16]
    BIAS,  # float32 [panels * 16]
    ITEMS,  # how many items there are
    ITEM_ROWS,  # rows and panels of one
    ITEM_PANELS,
    PARTS,  # items to a run of rows
    INTO,  # STORE, ADD or GATE of linear_cpu_words.py
) = range(32, 56)
WORDS = 56
