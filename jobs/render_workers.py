"""A table of workers. On a terminal: colours, cut to its width. Piped: plain lines, tabs between fields."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagemill.jobs.render import harmless, span
from pagemill.jobs.status import WorkerInfo

COLOURS = {"ready": "green", "draining": "yellow", "sick": "red"}
_RIGHT = ("shards", "rows", "tokens/s", "KV", "seen")
_HEADS = ("worker", "state", "model", "device", *_RIGHT, "host", "message")


def print_workers(workers: Iterable[WorkerInfo]) -> None:
    """Workers, one a line under a head; piped, with the same head, and figures without units."""
    if not sys.stdout.isatty():
        for place, worker in enumerate(workers):
            if place == 0:  # nothing has no head
                print(*_HEADS, sep="\t")
            print(*map(harmless, _plain(worker)), sep="\t")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in _HEADS:
        table.add_column(name, justify="right" if name in _RIGHT else "left", overflow="fold")
    for worker in workers:
        table.add_row(*_cells(worker))
    Console(highlight=False).print(table)


def _plain(worker: WorkerInfo) -> list[str]:
    figures = (worker.shards_running, worker.rows_running, round(worker.tokens_per_second, 1))
    return [
        worker.worker, worker.state, _models(worker), worker.device, *map(str, figures),
        f"{worker.kv_used:.2f}", f"{_age(worker):.0f}", f"{worker.host}:{worker.pid}", worker.message,
    ]  # fmt: skip


def _cells(worker: WorkerInfo) -> list[Text]:
    texts = [
        worker.worker, worker.state, _models(worker), worker.device, f"{worker.shards_running:,}",
        f"{worker.rows_running:,}", f"{worker.tokens_per_second:,.0f}", f"{worker.kv_used:.0%}",
        f"{span(_age(worker))} ago", f"{worker.host}:{worker.pid}", worker.message,
    ]  # fmt: skip
    colour = COLOURS.get(worker.state, "")
    return [Text(harmless(text), colour if place == 1 else "") for place, text in enumerate(texts)]


def _models(worker: WorkerInfo) -> str:
    """Those it may load, the one in its engine first and marked where there are several."""
    others = [name for name in worker.models if name != worker.loaded]
    loaded = [worker.loaded + "*" if others else worker.loaded] if worker.loaded else []
    return ", ".join([*loaded, *others])


def _age(worker: WorkerInfo) -> float:
    """Seconds since its last heartbeat, by two clocks: Redis' and ours."""
    return max(0.0, time.time() - worker.seen_at)
