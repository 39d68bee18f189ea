"""Figures for Prometheus, and for the worker's own reports. Counting only: nothing here decides anything.

Each worker has a registry of its own, so that two of them in one process (a test, a one-shot run) do not
meet; endpoints.py answers with it. This room may not know who reads it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

# From a token on a fast machine to a row that waited behind a whole job.
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
BORDERS = [*map(floatToGoString, SECONDS), "+Inf"]
UNTIL = (("started", "queued_ms"), ("first_token", "first_token_ms"), ("end", "total_ms"))


class Seconds:
    """How many observations fell between which of SECONDS, and their sum."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts, self.total = [0] * len(BORDERS), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def add_to(self, family: HistogramMetricFamily, *labels: str) -> None:
        family.add_metric(
            labels, list(zip(BORDERS, accumulate(map(float, self.counts)), strict=True)), self.total
        )


class RowFigures(Collector):
    """What is counted for each row, in plain numbers: a worker ends thousands of rows a second, and the
    library's own counters, made for any number of threads, would be a fifth of what a row costs it. Only the
    event loop may count here."""

    def __init__(self) -> None:
        self.ended = Counts(completed=0, failed=0)
        self.tokens = Counts(prompt=0, completion=0, cached=0)
        self.until = {name: Seconds() for name, _ in UNTIL}
        self.inter_token = Seconds()

    def collect(self) -> Iterator[Metric]:
        """The registry asks, whenever somebody reads it."""
        rows = CounterMetricFamily("pagemill_rows", "Rows that ended, by how.", labels=["status"])
        tokens = CounterMetricFamily("pagemill_tokens", "Tokens of ended rows, by kind.", labels=["kind"])
        for family, counts in ((rows, self.ended), (tokens, self.tokens)):
            for label, count in counts.items():
                family.add_metric([label], count)
            yield family
        what = "Of a row, from its arrival at the engine."
        waited = HistogramMetricFamily("pagemill_row_seconds", what, labels=["until"])
        for name, seconds in self.until.items():
            seconds.add_to(waited, name)
        yield waited
        what = "Mean of a row, token to token."
        between = HistogramMetricFamily("pagemill_inter_token_seconds", what, labels=[])
        self.inter_token.add_to(between)
        yield between


class Figures:
    """Counters are since the worker's start; the engine's gauges are its process's last word."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rows = RowFigures()
        self.registry.register(self.rows)
        self.leases = self._counter("leases", "Tasks leased, by kind.", "kind")
        self.tasks = self._counter("tasks", "Tasks that ended here, by kind and how.", "kind", "outcome")
        self.segments = self._counter("segments", "Segments sealed.")
        self.storage_refusals = self._counter("storage_refusals", "Storage calls that had to be tried again.")
        self.model_changes = self._counter("model_changes", "Times the engine was given to another model.")
        self.engine_restarts = self._gauge("engine_restarts", "Times the engine's process was started again.")
        self.rows_in_flight = self._gauge("rows_in_flight", "Rows in the engine's process.")
        self.rows_limit = self._gauge("rows_limit", "Rows that may be there; fewer after memory ran out.")
        self.slots_busy = self._gauge("slots_busy", "Tasks running.")
        self.engine = self._gauge("engine", "The engine's own figures, by name.", "figure")

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"pagemill_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"pagemill_{name}", what, labels, registry=self.registry)

    def times(self, answer: Mapping[str, Any]) -> None:
        """How long one row waited and ran, from the engine's answer; what it does not hold is left out."""
        for until, name in UNTIL:
            if (milliseconds := answer.get(name)) is not None:
                self.rows.until[until].observe(milliseconds / 1000)
        if (milliseconds := answer.get("inter_token_ms")) is not None:
            self.rows.inter_token.observe(milliseconds / 1000)

    def row(self, status: str, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        """One row ended."""
        self.rows.ended[status] += 1
        tokens = self.rows.tokens
        tokens["prompt"] += prompt_tokens
        tokens["completion"] += completion_tokens
        tokens["cached"] += cached_tokens

    def look(
        self,
        restarts: int,
        rows_in_flight: int,
        rows_limit: int,
        slots_busy: int,
        engine: Mapping[str, float],
    ) -> None:
        """Once a second: what is running."""
        self.engine_restarts.set(restarts)
        self.rows_in_flight.set(rows_in_flight)
        self.rows_limit.set(rows_limit)
        self.slots_busy.set(slots_busy)
        for name, value in engine.items():
            self.engine.labels(name).set(value)
