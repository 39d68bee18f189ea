"""What every part is told: the device, whether this is a rehearsal, the seed, what earlier parts found."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_check.fault import Fault

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class Setting:
    """dry: shapes are tiny, nothing is timed twice, and no mark means anything. share: which of so many
    processes this is, for parts that are cut. deadline: on the monotonic clock. facts: of earlier parts.
    only: what the names of all that is done hold. start: how processes are."""

    device: torch.device
    dry: bool
    seed: int
    share: tuple[int, int] = (0, 1)
    deadline: float = float("inf")
    facts: dict[str, Any] = field(default_factory=dict)
    fault: Fault | None = None
    only: str = ""
    start: str = "fork"

    def wants(self, name: str) -> bool:
        """Whether a check or figure of this name is to be made."""
        return self.only in name

    def generator(self, name: str) -> torch.Generator:
        """Random numbers that hang on the run's seed and this name only, so that each part can run alone."""
        made = torch.Generator(self.device)
        made.manual_seed(zlib.crc32(name.encode()) ^ self.seed)
        return made

    @property
    def left(self) -> float:
        """Seconds until the part should be done."""
        return self.deadline - time.monotonic()

    @property
    def sixteen(self) -> torch.dtype:
        """The interpreter's products of bfloat16 are wrong: it multiplies the bit patterns."""
        return torch.float16 if self.dry else torch.bfloat16

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float16,) if self.dry else (torch.bfloat16, torch.float16)

    @property
    def all_dtypes(self) -> tuple[torch.dtype, ...]:
        return self.dtypes if self.dry else (*self.dtypes, torch.float32)
