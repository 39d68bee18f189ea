"""Triton's interpreter, where a rehearsal would trip over it and not over us."""

from __future__ import annotations

from typing import Any

import triton
from triton.runtime import interpreter


def mend() -> None:
    """Triton 3.6 makes a Python number of an array of one element, which NumPy refuses since 2.4."""
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
        return
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
