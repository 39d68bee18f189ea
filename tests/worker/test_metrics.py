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


def test_it_answers_on_loopback_and_stops() -> None:
    figures = Figures()
    port = figures.serve(0)
    figures.row("completed", 7, 5, 0)
    assert 'pagemill_tokens_total{kind="prompt"} 7.0' in fetched(port)
    figures.close()
    with pytest.raises(OSError):
        fetched(port)


async def test_a_worker_counts_what_it_did(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pagemill")
    async with place.worker(metrics_port=0), place.client() as client:
        job = await client.submit(["the secret prompt"] * 30, model=place.model)
        rows = await whole(place, client, job, 30)
        (port,) = re.findall(r"metrics on http://127\.0\.0\.1:(\d+)", caplog.text)
        text = await asyncio.to_thread(fetched, int(port))
    assert 'pagemill_rows_total{status="completed"} 30.0' in text
    assert 'pagemill_tasks_total{kind="finalize",outcome="done"} 1.0' in text
    assert 'pagemill_leases_total{kind="shard"} 1.0' in text
    for told in (text, caplog.text):
        assert "secret" not in told
        assert (rows[0].text or "?") not in told
