"""Reads typed values out of a model's config, and says what is wrong with it in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagemill.engine.errors import ModelLoadError


class Fields:
    """A config with the name it goes by in messages. A null counts as absent, as transformers has it."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def _get(self, name: str, kinds: tuple[type, ...], default: Any, what: str) -> Any:
        value = self.values.get(self.prefix + name)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self.source} lacks {self.prefix}{name}.")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ModelLoadError(f"{self.source}: {self.prefix}{name} must be {what}, not {value!r}.")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """A count of at least 1."""
        value = int(self._get(name, (int,), default, "a whole number"))
        if value < 1:
            raise ModelLoadError(f"{self.source}: {self.prefix}{name} must be at least 1, not {value}.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._get(name, (int, float), default, "a number"))

    def boolean(self, name: str, default: bool) -> bool:
        return bool(self._get(name, (bool,), default, "true or false"))

    def text(self, name: str, default: str) -> str:
        return str(self._get(name, (str,), default, "a string"))

    def section(self, name: str) -> Fields | None:
        value = self.values.get(self.prefix + name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ModelLoadError(f"{self.source}: {name} must be an object, not {value!r}.")
        return Fields(value, f"{name} in {self.source}")

    def must_equal(self, name: str, default: object, supported: object) -> None:
        """Refuses a model whose flag has a value that the decoder does not compute."""
        value = self.values.get(self.prefix + name)
        value = default if value is None else value
        if value != supported:
            raise ModelLoadError(
                f"{self.source}: {self.prefix}{name} is {value!r}; this version computes {supported!r} only."
            )
