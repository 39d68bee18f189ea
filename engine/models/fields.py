"""Reads typed values out of a model's config, and says what is wrong with it in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagemill.engine.errors import ModelLoadError


class Fields:
    """A config with the name it goes by in messages.

    defaults: what an absent value stands for, by name; a default given with the question comes first. A
    null counts as absent, as transformers has it, but for `optional_integer` and `optional_number`.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.values = values
        self.source = source
        self.prefix = prefix
        self.defaults = defaults or {}

    def has(self, name: str) -> bool:
        return self.values.get(self.prefix + name) is not None

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = int(self._get(name, (int,), default, "a whole number"))
        if value < least:
            raise ModelLoadError(f"{self.source}: {self.prefix}{name} must be at least {least}, not {value}.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._get(name, (int, float), default, "a number"))

    def positive(self, name: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.number(name, default)
        if not value > 0:
            raise ModelLoadError(f"{self.source}: {self.prefix}{name} must be above 0, not {value:g}.")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        return bool(self._get(name, (bool,), default, "true or false"))

    def text(self, name: str, default: str) -> str:
        return str(self._get(name, (str,), default, "a string"))

    def optional_integer(self, name: str) -> int | None:
        """A count of at least 1, or None where it is null, or absent without a default."""
        return self.integer(name) if self._is_set(name) else None

    def optional_number(self, name: str) -> float | None:
        """A number above 0, or None where it is null, or absent without a default."""
        return self.positive(name) if self._is_set(name) else None

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers, () where there is none."""
        values = self._get(name, (list,), [], "a list of numbers")
        if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
            raise ModelLoadError(f"{self.source}: {self.prefix}{name} must be a list of numbers.")
        return tuple(float(value) for value in values)

    def words(self, name: str) -> tuple[str, ...]:
        """A list of strings, () where there is none."""
        values = self._get(name, (list,), [], "a list of strings")
        if not all(isinstance(value, str) for value in values):
            raise ModelLoadError(f"{self.source}: {self.prefix}{name} must be a list of strings.")
        return tuple(values)

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

    def _is_set(self, name: str) -> bool:
        if self.prefix + name in self.values:
            return self.has(name)
        return self.defaults.get(name) is not None

    def _get(self, name: str, kinds: tuple[type, ...], default: Any, what: str) -> Any:
        value = self.values.get(self.prefix + name)
        if value is None:
            value = self.defaults.get(name) if default is None else default
        if value is None:
            raise ModelLoadError(f"{self.source} lacks {self.prefix}{name}.")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ModelLoadError(f"{self.source}: {self.prefix}{name} must be {what}, not {value!r}.")
        return value
