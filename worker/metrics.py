"""Figures for Prometheus, and for the worker's own reports. Counting only: nothing here decides anything.

Each worker has a registry of its own, so that two of them in one process (a test, a one-shot run) do not
meet; endpoints.py answers with it. This room may not know who reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# From a token on a fast machine to a row that waited behind a whole job.
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)


class Figures:
    """Counters are since the worker's start; the engine's gauges are its process's last word."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rows = self._counter("rows", "Rows that ended, by how.", "status")
        self.tokens = self._counter("tokens", "Tokens of ended rows, by kind.", "kind")
        self.row_seconds = self._seconds("row_seconds", "Of a row, from its arrival at the engine.", "until")
        self.inter_token_seconds = self._seconds("inter_token_seconds", "Mean of a row, token to token.")
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
        # Looking a label up costs as much as counting.
        self._ended = {status: self.rows.labels(status) for status in ("completed", "failed")}
        self._of_kind = [self.tokens.labels(kind) for kind in ("prompt", "completion", "cached")]

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"pagemill_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"pagemill_{name}", what, labels, registry=self.registry)

    def _seconds(self, name: str, what: str, *labels: str) -> Histogram:
        return Histogram(f"pagemill_{name}", what, labels, registry=self.registry, buckets=SECONDS)

    def times(self, answer: Mapping[str, Any]) -> None:
        """How long one row waited and ran, from the engine's answer; what it does not hold is left out."""
        for until, name in (("started", "queued_ms"), ("first_token", "first_token_ms"), ("end", "total_ms")):
            if (milliseconds := answer.get(name)) is not None:
                self.row_seconds.labels(until).observe(milliseconds / 1000)
        if (milliseconds := answer.get("inter_token_ms")) is not None:
            self.inter_token_seconds.observe(milliseconds / 1000)

    def row(self, status: str, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        """One row ended."""
        self._ended[status].inc()
        for counter, count in zip(
            self._of_kind, (prompt_tokens, completion_tokens, cached_tokens), strict=True
        ):
            if count:
                counter.inc(count)

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
