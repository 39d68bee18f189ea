"""Whether a kernel's results are the reference's, in three ways at once.

Each number within its tolerance; the norm of all differences within a limit of its own, which finds what is a
little wrong everywhere (a scale that is off by a percent hides in the tolerance of 16 bits); and nothing that
was not written, which is NaN where the reference is not, or not the reference's integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_check.record import Check

# Where a tolerance is 0 a number that is off is off by this many times what is allowed.
BY_FAR = 1e9


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|found - expected| <= absolute + relative * |expected| for each number, and ||found - expected|| <=
    norm * ||expected|| for all. All zero: the same bits, but for NaN."""

    relative: float = 0.0
    absolute: float = 0.0
    norm: float = 0.0


EXACT = Tolerance()
# For results of about 1 that are rounded to the dtype two or three times on their way.
ROUNDED = {
    torch.bfloat16: Tolerance(2e-2, 2e-2, 6e-3),
    torch.float16: Tolerance(3e-3, 3e-3, 1e-3),
    torch.float32: Tolerance(1e-5, 1e-5, 1e-5),
}


def compare(
    name: str, found: Sequence[Tensor], expected: Sequence[Tensor], how: Sequence[Tolerance]
) -> Check:
    """One check of all of a kernel's results."""
    worst, wrong = 0.0, []
    for number, (mine, right, tolerance) in enumerate(zip(found, expected, how, strict=True)):
        share, reason = _one(mine, right, tolerance)
        worst = max(worst, share)
        if reason:
            wrong.append(f"result {number}: {reason}" if len(found) > 1 else reason)
    return Check(name, not wrong, round(worst, 4), "; ".join(wrong))


def _one(found: Tensor, expected: Tensor, how: Tolerance) -> tuple[float, str]:
    """The largest share of the tolerance that is used up, and what is wrong."""
    if found.shape != expected.shape:
        return BY_FAR, f"its shape is {list(found.shape)}, not {list(expected.shape)}"
    if not found.numel():
        return 0.0, ""
    mine, right = _wide(found), _wide(expected.to(found.device))
    unwritten = mine.isnan() & ~right.isnan()
    if unwritten.any():
        return BY_FAR, f"{int(unwritten.sum())} of {mine.numel()} numbers are NaN or were not written"
    same = (mine == right) | (mine.isnan() & right.isnan())
    off = torch.where(same, 0.0, (mine - right).abs())
    right = torch.where(same, torch.where(right.isfinite(), right, 0.0), right)
    # Infinity against a number, or a number against NaN, is further off than any tolerance.
    off = torch.where(off.isfinite(), off, BY_FAR)
    allowed = how.absolute + how.relative * right.abs().nan_to_num(0.0)
    shares = torch.where(off > 0, (off / allowed.clamp(min=1e-300)).clamp(max=BY_FAR), 0.0)
    share = float(shares.max())
    if share > 1:
        place = int(shares.argmax())
        values = f"{float(mine.reshape(-1)[place]):.6g} is not {float(right.reshape(-1)[place]):.6g}"
        return share, f"{int((shares > 1).sum())} of {mine.numel()} numbers are off, first {values}"
    norm, whole = float(off.norm()), float(right.norm())
    if norm > how.norm * whole:
        return norm / max(
            how.norm * whole, 1e-300
        ), f"all together are off by {norm / max(whole, 1e-300):.2g}"
    return max(share, norm / (how.norm * whole) if norm else 0.0), ""


def _wide(x: Tensor) -> Tensor:
    if x.dtype == torch.int64:
        # float64 would take neighbours above 2**53 for the same: both halves side by side.
        return torch.stack([x >> 32, x & 0xFFFFFFFF], -1).double()
    return x.float().double() if x.element_size() < 4 else x.double()
