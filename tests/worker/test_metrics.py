"""Figures for Prometheus: what happened, and nothing that was said."""

from __future__ import annotations

import asyncio
import re
import urllib.request

import pytest
from worker_place import Place, whole

from pagemill.worker.metrics import Figures


def fetched(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
    return text


def test_times_of_a_row_that_never_started_are_left_out() -> None:
    figures = Figures()
    figures.times({"queued_ms": 500.0, "first_token_ms": 750.0, "total_ms": 2750.0, "inter_token_ms": 20.0})
    figures.times({"queued_ms": None, "status": "failed"})

    def value(name: str, **labels: str) -> float | None:
        return figures.registry.get_sample_value(name, labels)

    assert value("pagemill_row_seconds_sum", until="started") == 0.5
    assert value("pagemill_row_seconds_sum", until="first_token") == 0.75
    assert value("pagemill_row_seconds_sum", until="end") == 2.75
    assert value("pagemill_row_seconds_count", until="started") == 1
    assert value("pagemill_inter_token_seconds_sum") == 0.02
    assert value("pagemill_inter_token_seconds_bucket", le="0.02") == 1


def test_the_engines_own_counters_reach_the_worker() -> None:
    """All that EngineMetrics has but what the worker counts itself, as of now."""
    from pagemill.engine.metrics import EngineMetrics
    from pagemill.worker.native import FIGURES

    assert {*FIGURES, "running", "steps"} == {*EngineMetrics.__slots__, "hit_rate"}


async def test_a_worker_counts_what_it_did(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pagemill")
    async with place.worker(metrics_port=0), place.client() as client:
        job = await client.submit(["the secret prompt"] * 30, model=place.model)
        rows = await whole(place, client, job, 30)
        (port,) = re.findall(r"metrics on http://127\.0\.0\.1:(\d+)", caplog.text)
        text = await asyncio.to_thread(fetched, int(port))
    assert 'pagemill_rows_total{status="completed"} 30.0' in text
    assert 'pagemill_row_seconds_count{until="end"} 30.0' in text
    assert 'pagemill_tasks_total{kind="finalize",outcome="done"} 1.0' in text
    assert 'pagemill_leases_total{kind="shard"} 1.0' in text
    for told in (text, caplog.text):
        assert "secret" not in told
        assert (rows[0].text or "?") not in told
