"""What the compiled small operations and their callers agree upon: the words of the parameter blocks.

Numbers only: the caller may read them without numba.
"""

from __future__ import annotations

# Rows that a thread takes at once.
ROWS_A_TIME = 4

# int64 each. The first is counted up by threads and lies 64 bytes or more, and so a cache line, apart from
# what all threads only read.
ITEM = 0
# Of both: rows, and the address of x with its bytes from row to row.
ROWS, X, X_ROW = 8, 9, 10
# Of the norm.
OUT, WIDTH, WEIGHT, EPS = range(11, 15)
# Of rope and write.
(
    COS,  # [rows, half]
    SIN,
    PAIRS,  # how many of a head are rotated
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    LAYER,  # address, and bytes from block to block, from keys to values and from head to head
    BLOCK_BYTES,
    VALUES,
    HEAD_BYTES,
    BLOCKS,  # int64 [rows]
    OFFSETS,
    NORM,  # weights [HEADS + KV_HEADS, HEAD_DIM] of a norm before heads turn, 0 for none
    NORM_EPS,
    TOGETHER,  # tokens that a thread takes at once
) = range(11, 26)
SIZE = 26
