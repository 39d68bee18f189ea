"""What the compiled dense layer and its caller agree upon: sizes, and the words of the parameter block.

Numbers only: the caller may read them without numba.
"""

from __future__ import annotations

# Outputs of a panel: weights are laid out [outputs / 16, inputs, 16].
PANEL = 16
# Most inputs summed in one chain before they join the rest: 24 KB of a panel, which a core's first cache
# holds. Short chains also round less (a third of one chain's error at 1,536 inputs).
DEPTH = 384
# Inputs come in fours.
UNROLL = 4
# Most tokens whose sums a thread holds at once.
MOST_ROWS = 96

# Where sums go.
STORE, ADD, GATE = 0, 1, 2

# Words of the parameter block, int64 each. The first is counted up by threads and lies 64 bytes or more, and
# so a cache line, apart from what all threads only read.
ITEM = 0
(
    ROWS,
    X,  # address of float32, and bytes from row to row
    X_ROW,
    OUT,  # the same
    OUT_ROW,
    INPUTS,
    PANELS,
    WEIGHT,
    BIAS,  # address of float32, 0 for none
    INTO,  # STORE, ADD or GATE: out = y, out += y, out = silu(y of even panels) * (y of odd panels)
    CHUNK,  # rows of an item, and how many items a panel has
    CHUNKS,
    CHAIN,  # inputs of a chain
) = range(8, 21)
