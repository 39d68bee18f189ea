"""Where Triton kernels are tested: on a card if there is one, else interpreted on tensors of the CPU.

tests/conftest.py has chosen the interpreter before anything could import Triton. Its matrix products are
wrong for bfloat16 (it multiplies the bit patterns), so interpreted tests take float16 and float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from quick_interpreter import replace_once


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def interpreted_in_half_the_time() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        replace_once(patch)
        yield


@pytest.fixture
def fresh() -> int:
    """The seed of random numbers that no run had before; pytest shows it where the test fails."""
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    print(f"seed {seed}")
    return seed


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are allocated and not written are NaN, integers the largest."""
    empty = torch.empty

    def full_of_nan(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        if made.dtype == torch.bool:
            return made.fill_(True)
        return made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).max)

    monkeypatch.setattr(torch, "empty", full_of_nan)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A card says nothing of overflow and of NaN, which kernels mean; numpy, which interprets them, would."""
    with np.errstate(all="ignore"):
        yield
