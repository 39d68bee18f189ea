"""Where Triton kernels are tested: on a card if there is one, else interpreted on tensors of the CPU.

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


@pytest.fixture
def poisoned() -> Iterator[None]:
    """What is allocated and not written holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A card says nothing of overflow and of NaN, which kernels mean; numpy, which interprets them, would."""
    with np.errstate(all="ignore"):
        yield
