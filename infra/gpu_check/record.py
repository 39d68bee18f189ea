"""What a part has found out: checks, which are right or wrong, and figures, which are large or small."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """name: kernel, shape and dtype. ok: whether it is right. error: the largest share of what is allowed
    that a number was off by. detail: what is wrong with it."""

    name: str
    ok: bool
    error: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """value: of `unit`. of: name of what it is compared with, and share: how much of it it reaches. mark: the
    share that is promised on a Hopper card, None for none. below: whether the mark says at most and not at
    least. ms: the median time; spread: of the middle half of the times, as a share of the median."""

    name: str
    value: float
    unit: str
    of: str = ""
    share: float | None = None
    mark: float | None = None
    at_most: bool = False
    ms: float | None = None
    spread: float | None = None
    detail: str = ""

    @property
    def met(self) -> bool | None:
        if self.mark is None or self.share is None:
            return None
        return self.share <= self.mark if self.at_most else self.share >= self.mark


@dataclass(slots=True)
class Findings:
    """Of one part. facts: numbers that later parts use. error: why it did not come to its end."""

    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and all(check.ok for check in self.checks)

    def add(self, other: Findings) -> None:
        """What another share of the same part found; shares run beside one another."""
        self.checks += other.checks
        self.figures += other.figures
        self.facts |= other.facts
        self.seconds = max(self.seconds, other.seconds)
        self.error = "; ".join(filter(None, (self.error, other.error))) or None

    def record(self) -> dict[str, Any]:
        figures = [asdict(figure) | {"met": figure.met} for figure in self.figures]
        return {
            "ok": self.ok,
            "error": self.error,
            "seconds": round(self.seconds, 2),
            "facts": self.facts,
            "checks": [asdict(check) for check in self.checks],
            "figures": figures,
        }

    @classmethod
    def read(cls, record: dict[str, Any]) -> Findings:
        figures = [{k: v for k, v in figure.items() if k != "met"} for figure in record["figures"]]
        return cls(
            [Check(**check) for check in record["checks"]],
            [Figure(**figure) for figure in figures],
            record["facts"],
            record["seconds"],
            record["error"],
        )
