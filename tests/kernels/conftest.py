"""The same random numbers in every run, and what "the same result" means on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def assert_same() -> Callable[[Tensor, Tensor], None]:
    """Equal to the last bit where that was found to hold (AVX2); elsewhere within rounding.

    Math libraries choose kernels by processor, and on another one may sum in an order that depends on the
    number of rows.
    """
    exact = torch.backends.cpu.get_cpu_capability() == "AVX2"

    def check(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if exact else 1e-5)

    return check
