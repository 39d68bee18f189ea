"""Progress on a terminal and in a pipe, and the tables of jobs and workers."""

from __future__ import annotations

import dataclasses
import io
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from fake_worker import unique, work
from rich.console import Console

from pagemill.jobs.client import Client
from pagemill.jobs.progress import Follower, expected_tokens
from pagemill.jobs.recent import RecentErrors
from pagemill.jobs.render_workers import print_workers
from pagemill.jobs.status import JobStatus, WorkerInfo

BEGUN = JobStatus.from_hash("job-1", {"state": "in_progress", "model": "m", "total": "400"})
HALF = dataclasses.replace(
    BEGUN, completed=197, failed=3, prompt_tokens=6000, cached_tokens=4500, completion_tokens=2000,
    tokens_per_second=812.4, eta_seconds=65.0, workers_active=2,
)  # fmt: skip
ENDED = dataclasses.replace(
    HALF, state="completed", completed=397, tokens_per_second=0.0, eta_seconds=None, workers_active=0
)
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


class Told:
    """Errors that are known already."""

    def __init__(self) -> None:
        self.codes = Counter({"invalid_request": 2, "prompt_too_long": 1})
        self.latest = deque(["invalid_request: line 5: \x1b[31mbad", "prompt_too_long: line 9: too long"])
        self.told = 2

    async def look(self, *, ended: bool = False) -> None:
        pass


async def statuses(*given: JobStatus) -> AsyncIterator[JobStatus]:
    for status in given:
        yield status


async def shown(*given: JobStatus, terminal: bool, width: int = 100) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=width, highlight=False, color_system=None)
    last = await Follower(console).follow(statuses(*given), cast(RecentErrors, Told()))
    assert last is given[-1]
    return output.getvalue()


class Failing(Told):
    """Each look finds more of them, of which it reads some: (read, rows that failed by then)."""

    def __init__(self, *read: int) -> None:
        super().__init__()
        self.latest, self.told, self._read = deque(maxlen=5), 0, list(read)

    async def look(self, *, ended: bool = False) -> None:
        for _ in range(self._read.pop(0)):
            self.told += 1
            self.latest.append(f"numeric_error: {self.told}")


async def failures(
    *steps: tuple[int, int], store: str | None = None, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """What is said of failed rows in a pipe; steps: how many of how many that failed by then were read."""
    monkeypatch.setattr("pagemill.jobs.progress.PLAIN_EVERY_S", 0.0)
    output = io.StringIO()
    console = Console(file=output, force_terminal=False, width=100, highlight=False, color_system=None)
    given = [dataclasses.replace(HALF, failed=failed) for _, failed in steps]
    given[-1] = dataclasses.replace(given[-1], state="completed")
    errors = Failing(*(read for read, _ in steps))
    await Follower(console, store=store).follow(statuses(*given), cast(RecentErrors, errors))
    return [line for line in output.getvalue().splitlines() if line.startswith("failed · ")]


async def test_piped_it_is_plain_lines_with_everything_in_them() -> None:
    text = await shown(BEGUN, HALF, ENDED, terminal=False)
    assert not CONTROL.search(text)
    lines = text.splitlines()
    assert "failed · invalid_request: line 5: \\x1b[31mbad" in lines
    assert lines[-1] == (
        "completed · 397 completed, 3 failed, of 400 · tokens 6,000 in (4,500 cached, 75%), 2,000 out · "
        "2 invalid_request, 1 prompt_too_long"
    )


async def test_piped_it_says_how_many_failures_it_does_not_show_and_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await failures((5, 40), (2, 42), (0, 45), (1, 1050), (0, 1050), monkeypatch=monkeypatch) == [
        *(f"failed · numeric_error: {n}" for n in (3, 4, 5)),
        "failed · and 37 more: pagemill results job-1 --partial",
        *(f"failed · numeric_error: {n}" for n in (6, 7)),
        "failed · numeric_error: 8",
        "failed · and 1,007 more: pagemill results job-1 --partial",
    ]
    assert await failures((1, 1), (0, 3), store="my out", monkeypatch=monkeypatch) == [
        "failed · numeric_error: 1",
        "failed · and 2 more: pagemill results job-1 --store 'my out'",
    ]
    # Read before the count was.
    assert len(await failures((3, 2), (0, 3), monkeypatch=monkeypatch)) == 3


async def test_on_a_terminal_there_are_bars_and_what_goes_wrong() -> None:
    text = await shown(BEGUN, HALF, terminal=True)
    for words in (
        "197 completed, 3 failed, of 400", "50%", "8,000 of about 16,000", "812 tokens/s", "75% cached",
        "1:05 left", "2 workers",
        "3 failed: 2 invalid_request, 1 prompt_too_long", "line 9: too long", "\\x1b[31mbad",
    ):  # fmt: skip
        assert words in text, words
    assert "\x1b[31mbad" not in text


@pytest.mark.parametrize("width", [20, 40, 200])
async def test_a_narrow_terminal_is_not_overrun(width: int) -> None:
    text = await shown(HALF, terminal=True, width=width)
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n").split("\n")
    bars = [line for line in drawn if line.startswith(("rows", "tokens", "  prompt_too"))]
    assert bars
    assert max(map(len, bars)) <= width


def test_tokens_to_come_are_like_those_that_came() -> None:
    assert expected_tokens(BEGUN) is None
    assert expected_tokens(HALF) == 16_000


async def test_recent_errors_come_from_what_is_published(redis_url: str, tmp_path: Path) -> None:
    async with Client(redis_url, str(tmp_path / "store")) as client:
        model = unique("model")
        rows: list[Any] = ["a", {"prompt": 5}, {"prompt": "x", "min_p": 7}]
        job = await client.submit(rows, model=model)
        errors = RecentErrors(client, job.id)
        await errors.look()
        assert not errors.codes
        await work(await client.state(), client.storage, model, tasks=1)
        await errors.look()
        assert errors.codes == {"invalid_request": 2}
        assert [text.split(":")[1] for text in errors.latest] == [" line 2", " line 3"]
        await work(await client.state(), client.storage, model)
        await errors.look(ended=True)
        assert errors.codes == {"invalid_request": 2}
        assert errors.told == 2


async def test_a_store_that_is_away_does_not_end_the_watching(redis_url: str, tmp_path: Path) -> None:
    async with Client(redis_url, str(tmp_path / "store")) as client:
        model = unique("model")
        job = await client.submit([{"prompt": 5}], model=model)
        await work(await client.state(), client.storage, model, tasks=1)
        for path in (tmp_path / "store").rglob("*.parquet"):
            path.unlink()
        errors = RecentErrors(client, job.id)
        await errors.look()
        assert errors.codes == {"invalid_request": 1}


WORKERS = [
    WorkerInfo(worker="w1", host="a", pid=5, state="ready", models=("llama", "qwen"), loaded="qwen",
               device="cpu", seen_at=time.time(), shards_running=2, rows_running=64, kv_used=0.5,
               tokens_per_second=99.5),
    WorkerInfo(worker="w2", host="b", state="sick", models=("llama",), message="a\x1bfault", seen_at=1.0),
]  # fmt: skip


def test_workers_piped_are_fields_between_tabs(capsys: pytest.CaptureFixture[str]) -> None:
    print_workers(WORKERS)
    head, first, second = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert len(head) == len(first)
    assert dict(zip(head, first, strict=True))["tokens/s"] == "99.5"
    assert first[:8] == ["w1", "ready", "qwen*, llama", "cpu", "2", "64", "99.5", "0.50"]
    assert first[9] == "a:5"
    assert (second[1], second[-1]) == ("sick", "a\\x1bfault")
