"""What is compiled ahead of time: a kernel, its argument types and how it is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# How products and sums are contracted, said at every launch, since Triton's own default differs by release.
FP_FUSION = True


@dataclass(frozen=True, slots=True)
class Variant:
    """See the table in README.md."""

    kernel: Any
    name: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3
    targets: tuple[int, ...] = (80, 90, 100)
