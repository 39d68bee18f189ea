"""How compiled kernels multiply numbers: what a variant of a kernel is compiled for.

Numbers and dtypes only: whoever asks need not load numba.
"""

from __future__ import annotations

import torch

# float32; bfloat16 widened to it in a register; bfloat16 in pairs, where a CPU multiplies these by itself.
FLOAT32, WIDENED, PAIRS = 0, 1, 2


def kind_of(dtype: torch.dtype, pairs: bool) -> int:
    """pairs: whether the CPU has the instruction, and all that is multiplied is there in bfloat16."""
    if dtype == torch.float32:
        return FLOAT32
    return PAIRS if pairs else WIDENED
