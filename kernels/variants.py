"""What a Triton kernel is compiled as: one row of the table of canonical variants.

Each `*_triton.py` beside this file lists its own in `variants()`, with the tile, warps and stages that its
launches use; compile.py compiles them all. Needs no Triton to be imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Whether a * b + c may become one instruction. The default differs between versions of Triton, and with it
# the last bits of a result: every launch and every compilation passes this.
FP_FUSION = True

TARGETS = (80, 90, 100)


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation of a kernel, but for the card.

    kernel: the `@triton.jit` function. name: unique within the kernel. signature: type of each run-time
    argument in order, as Triton writes it ("*bf16", "i32", "fp32"), with ":16" where the value, or the
    address, is divisible by 16 at every launch: without that loads are not vectorised. constexprs: all other
    arguments. targets: compute capabilities times ten. wgmma: whether it must have come to use the matrix
    unit of a Hopper card, which takes 64 rows at a time.
    """

    kernel: Any
    name: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    num_warps: int
    num_stages: int
    targets: tuple[int, ...] = TARGETS
    wgmma: bool = False

    @property
    def full_name(self) -> str:
        return f"{self.kernel.__name__}/{self.name}"
