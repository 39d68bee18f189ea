"""What a rehearsal on a CPU would trip over that a run on a card does not: libraries, not us."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import triton
from triton.runtime import interpreter


def mend() -> None:
    _scalars()
    _memory()


def _scalars() -> None:
    """Triton 3.6 interpreted makes a Python number of an array of one element, which NumPy refuses since
    2.4."""
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
        return
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _memory() -> None:
    """transformers' batching asks psutil how much memory a CPU has, and without it takes that for none."""
    cache = import_module("transformers.generation.continuous_batching.cache")
    if hasattr(cache, "get_device_and_memory_breakdown"):
        cache.get_device_and_memory_breakdown = lambda: (torch.device("cpu"), 1 << 30, 0, 0)
