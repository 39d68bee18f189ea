"""Triton's interpreter without half of its work.

It puts its own functions in the place of the language's at each call of one device function by another, going
over all names of the language, although the launch has just done so: half of the time that it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


class Nothing:
    """A scope in which nothing was replaced."""

    def restore(self) -> None:
        pass


def replace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces only what is not replaced already."""
    replace: Callable[[object], Any] = interpreter._patch_lang

    def replace_if_needed(function: object) -> Any:
        if any(tl.core.is_builtin(module.load) for module in (tl, tl.core)):
            return replace(function)
        return Nothing()

    monkeypatch.setattr(interpreter, "_patch_lang", replace_if_needed)
