"""Where Triton kernels are tested: natively on a card if there is one, else interpreted on tensors of the CPU.

tests/conftest.py has chosen the interpreter before anything could import Triton. Its matrix products are
wrong for bfloat16 (it multiplies the bit patterns), so interpreted tests take float16 and float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def silent_numpy() -> Iterator[None]:
    """What overflows or divides by zero behind a mask is meant to, and numpy interprets."""
    with np.errstate(all="ignore"):
        yield
