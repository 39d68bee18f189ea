"""Rows of numbers as 8 bits each and one scale: what 8-bit memory and 8-bit products have in common."""

from __future__ import annotations

import torch
from torch import Tensor

# The largest number of each dtype of 8 bits.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# A row with nothing above this counts as zeros: 448 over a smaller number would not be finite.
SMALLEST_ROW = 1e-30


def round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., width] as 8 bits and float32 scales [...]: x = values * scale, nearly.

    The scale of a row that is not finite is NaN, its values are 0.
    """
    wide, most = x.float(), LARGEST[dtype]
    largest = wide.abs().amax(-1)
    finite = largest.isfinite()
    usable = finite & (largest >= SMALLEST_ROW)
    # torch takes a number over a tensor for a product with the reciprocal, which rounds twice.
    factor = torch.where(usable, torch.full_like(largest, most) / largest, 0.0)
    scaled = torch.where(usable.unsqueeze(-1), wide, 0.0) * factor.unsqueeze(-1)
    values = (scaled.round_() if dtype is torch.int8 else scaled).to(dtype)
    return values, torch.where(finite, torch.where(usable, largest / most, 0.0), torch.nan)
