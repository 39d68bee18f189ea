"""What became of a job that has ended, in figures: over time, by length, by how rows ended, by what failed.

Read from the manifest and from a few narrow columns of its parts, in memory that grows with the job's seconds
and with the lengths that occur, and not with its rows. This room may not know how the figures are shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from pagemill.jobs import layout
from pagemill.jobs.errors import UsageError
from pagemill.jobs.results import iter_columns
from pagemill.jobs.storage import Storage, read_json

COLUMNS: Final = [
    "status", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "error_code",
    "error_message", "queued_ms", "first_token_ms", "total_ms", "finished_at",
]  # fmt: skip
STEP: Final = 1.02
"""Waiting times are counted in classes that grow by so much: percentiles are right to one per cent."""
TIMES: Final = ("queued_ms", "first_token_ms", "total_ms")


@dataclass(frozen=True, slots=True)
class Price:
    """What the machines cost. gpus: how many worked at once.  hour: the price of one of them for an hour."""

    hour: float
    gpus: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.hour) and self.hour >= 0 and self.gpus >= 1):
            raise UsageError("A price is 0 or more for an hour, of one GPU or more.")

    def cost(self, seconds: float) -> float:
        return self.hour * self.gpus * seconds / 3600


@dataclass(slots=True)
class Clock:
    """What went on in each second since 1970 of a job; rows that do not say when they ended are left out.

    A row counts as in the engine from when the engine took it to its end. Its prompt's tokens count in the
    second of its first token, its answer's evenly from that second to its last.
    """

    rows: int = 0
    read: Counter[int] = field(default_factory=Counter)
    cached: Counter[int] = field(default_factory=Counter)
    began: Counter[int] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)
    _faster: Counter[int] = field(default_factory=Counter)  # second → tokens a second more from then on

    def add(self, batch: pa.RecordBatch) -> None:
        """Counts a batch of COLUMNS."""
        batch = batch.filter(batch.column("finished_at").is_valid())
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        ends, total = batch.column("finished_at"), batch.column("total_ms").fill_null(0.0)
        first = pc.min_element_wise(pc.coalesce(batch.column("first_token_ms"), total), total)
        last = _second(ends)
        token = _second(pc.subtract(ends, pc.divide(pc.subtract(total, first), 1000.0)))
        self.ended.update(_counts(last))
        self.began.update(_counts(_second(pc.subtract(ends, pc.divide(total, 1000.0)))))
        self.read.update(_sums(token, batch.column("prompt_tokens")))
        self.cached.update(_sums(token, batch.column("cached_tokens")))
        after = pc.add(last, 1)
        pace = pc.divide(batch.column("completion_tokens").cast(pa.float64()), pc.subtract(after, token))
        self._faster.update(_sums(token, pace))
        self._faster.subtract(_sums(after, pace))

    def written(self) -> Iterator[tuple[int, int, float]]:
        """Tokens of answers a second: (from second, up to and without, tokens a second), ascending."""
        return _levels(self._faster)

    def running(self) -> Iterator[tuple[int, int, float]]:
        """How many rows were in engines, in the same form; gaps have 0."""
        changes = Counter(self.began)
        changes.subtract({second + 1: rows for second, rows in self.ended.items()})
        return _levels(changes)

    @property
    def working_s(self) -> int:
        """Seconds in which at least one row was in an engine: neither queues, nor loads, nor outages."""
        return sum(there - here for here, there, rows in self.running() if rows)

    @property
    def span(self) -> tuple[int, int]:
        """The first second in which a row was in an engine, and the one after the last; (0, 0): none was."""
        return (min(self.began), max(self.ended) + 1) if self.began else (0, 0)


@dataclass(slots=True)
class Report:
    """Figures of one job.

    manifest: as finalize wrote it.  prompt, completion: tokens of a completed row → rows.
    reasons: finish reason → rows.  errors: code → rows, and one message of each in `examples`.
    times: column → class → rows (see `percentile`).
    """

    manifest: dict[str, Any]
    clock: Clock = field(default_factory=Clock)
    prompt: Counter[int] = field(default_factory=Counter)
    completion: Counter[int] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    times: dict[str, Counter[int]] = field(default_factory=lambda: {name: Counter() for name in TIMES})

    def add(self, batch: pa.RecordBatch) -> None:
        """Counts a batch of COLUMNS."""
        done = batch.filter(pc.equal(batch.column("status"), "completed"))
        self.prompt.update(_counts(done.column("prompt_tokens")))
        self.completion.update(_counts(done.column("completion_tokens")))
        self.reasons.update(_counts(done.column("finish_reason").fill_null("unknown")))
        self.errors.update(_counts(batch.column("error_code").drop_null()))
        self._take_examples(batch)
        for name in TIMES:
            self.times[name].update(_classes(batch.column(name)))
        self.clock.add(batch)

    def _take_examples(self, batch: pa.RecordBatch) -> None:
        new = set(self.errors) - set(self.examples)
        if new:
            pairs = zip(batch.column("error_code"), batch.column("error_message"), strict=True)
            for code, message in ((code.as_py(), message.as_py()) for code, message in pairs):
                if code in new:
                    self.examples.setdefault(code, message)


def gather(storage: Storage, job: str) -> Report:
    """The figures of a job that has ended.

    Raises JobNotFound, JobConflict where it has not ended, and StorageError where a part is missing or
    damaged.
    """
    batches = iter_columns(storage, job, COLUMNS)
    first = next(batches, None)  # before the manifest is read: this says what is wrong where there is none
    manifest = read_json(storage, layout.manifest(job))
    assert manifest is not None, "iter_columns has read it"
    report = Report(manifest)
    if first is not None:
        report.add(first)
    for batch in batches:
        report.add(batch)
    return report


def percentile(classes: Counter[int], share: float) -> float | None:
    """Milliseconds that a share of the rows (0 to 1) did not exceed, to one per cent; None without rows."""
    found = quantile(classes, share)
    return None if found is None else STEP ** (found - 0.5) if found > 0 else 0.0


def quantile(counts: Counter[int], share: float) -> int | None:
    """The smallest value that a share of the counted (0 to 1) does not exceed; None where there is none."""
    left = share * counts.total()
    for value, count in sorted(counts.items()):
        left -= count
        if left <= 1e-9:
            return value
    return None


def _counts(column: pa.Array) -> dict[Any, int]:
    return {found["values"]: found["counts"] for found in pc.value_counts(column).to_pylist()}


def _sums(keys: pa.Array, values: pa.Array) -> dict[Any, Any]:
    sums = pa.table([keys, values], names=["key", "value"]).group_by("key").aggregate([("value", "sum")])
    return {found["key"]: found["value_sum"] for found in sums.to_pylist()}


def _second(moments: pa.Array) -> pa.Array:
    return pc.floor(moments).cast(pa.int64())


def _levels(changes: Counter[int]) -> Iterator[tuple[int, int, float]]:
    """From changes at moments to what held between them."""
    moments = sorted(moment for moment, change in changes.items() if change)
    level: float = 0
    for here, there in pairwise(moments):
        level += changes[here]
        yield here, there, level


def _classes(column: pa.Array) -> dict[int, int]:
    """Milliseconds by class: 0 up to one, then by powers of STEP."""
    values = column.drop_null()
    powers = pc.ceil(pc.divide(pc.ln(pc.max_element_wise(values, 1.0)), math.log(STEP)))
    return _counts(powers.cast(pa.int64()))


def binned(counts: Counter[int], most: int) -> Iterable[tuple[int, int, int]]:
    """At most so many classes of equal and round width: (from, up to and without, rows), empty ones too."""
    if not counts:
        return
    low, high = min(counts), max(counts)
    width = _round_up((high - low + 1) / most)
    start = low // width * width
    sums = Counter[int]()
    for value, count in counts.items():
        sums[(value - start) // width] += count
    for index in range((high - start) // width + 1):
        yield start + index * width, start + (index + 1) * width, sums[index]


def _round_up(width: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50, …"""
    if width <= 1:
        return 1
    power = 10 ** math.floor(math.log10(width))
    return int(next(power * digit for digit in (1, 2, 5, 10) if power * digit >= width - 1e-9))
