"""What the compiled part of a program of kernels and its caller agree upon.

Numbers only: the caller may read them without numba.
"""

from __future__ import annotations

# Words from one call's parameters to the next's: as many as any kernel has, in whole cache lines.
STRIDE = 64

# Words of the program, int64 each. The first is counted up by threads and has a cache line of its own.
ARRIVED = 0
(
    COUNT,  # of phases
    LIST,  # [phases, 2]: the address of a function void(int64 *words), and that of its words
    TEAM_SIZE,  # the address of int(), which says how many threads have come
    YIELD,  # the address of int(), which lets another thread have the core
) = range(8, 12)
WORDS = 16

# How often a thread looks whether all are there before it gives way to others: some tenths of a millisecond.
PATIENCE = 20_000
