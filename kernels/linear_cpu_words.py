"""What the compiled dense layer and its caller agree upon: sizes, and the words of the parameter block.

Numbers only: the caller may read them without numba.
"""

from __future__ import annotations

# Outputs of a panel: weights are laid out [outputs / 16, lines, 16, inputs of a line], a line 64 bytes.
PANEL = 16
# Most lines summed in one chain before they join the rest: 24 KB of a panel, which a core's first cache
# holds. Short chains also round less (a third of one chain's error at 1,536 inputs).
DEPTH = 384
# Lines come in fours.
UNROLL = 4
# Tokens and panels of a register tile at most: with an address for each of six rows, a CPU's 16 registers for
# addresses are full.
TILE_ROWS, MOST_PANELS = 6, 4
# Most tokens whose sums a thread holds at once.
MOST_ROWS = 96

# Where sums go.
STORE, ADD, GATE = 0, 1, 2

# Words of the parameter block, int64 each. The first is counted up by threads and lies 64 bytes or more, and
# so a cache line, apart from what all threads only read.
ITEM = 0
(
    ROWS,
    X,  # address, and bytes from row to row
    X_ROW,
    OUT,  # the same
    OUT_ROW,
    LINES,  # of a panel
    PANELS,
    WEIGHT,
    BIAS,  # address of float32, 0 for none
    INTO,  # STORE, ADD or GATE: out = y, out += y, out = silu(y of even panels) * (y of odd panels)
    CHUNK,  # rows of an item, and how many items a panel has
    CHUNKS,
    CHAIN,  # lines of a chain
) = range(8, 21)
