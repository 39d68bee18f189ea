"""Names that somebody chose to do harm: ids, models and file names go through a whole job, and nothing leaves
its place, moves a terminal or runs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fake_worker import unique, work

from pagemill.jobs.cli import main
from pagemill.jobs.client import Client
from pagemill.jobs.errors import UsageError
from pagemill.jobs.report import gather
from pagemill.jobs.report_page import page

IDS = [
    "../../../../etc/passwd",
    "/etc/passwd",
    "..",
    "a/../../b",
    "nul\0in it",
    "\x1b]0;title\x07\x1b[2J",
    "line\nbreak\r\ttab",
    '=HYPERLINK("http://x")',
    "<script>alert(1)</script>",
    "{x}:pending",
    "pagemill:jobs",
    "$(touch harm)",
    "'; DROP TABLE rows; --",
    "%s%n{0}",
    "\u202egnp.exe",
    "x" * 1024,
]


@pytest.fixture
async def client(redis_url: str, tmp_path: Path) -> AsyncIterator[Client]:
    async with Client(redis_url, str(tmp_path / "a" / "b" / "store")) as opened:
        yield opened


class Tags(HTMLParser):
    """The elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)


NAMES = ["../../up", "a{b}c", "m:ready", "<marquee>m</marquee>", "m m'; --", "x" * 900, "*", "%00"]


@pytest.mark.parametrize("name", ["m\nm", "\x1b[31mred", "nul\0"])
async def test_a_model_s_name_can_be_shown(client: Client, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be shown"):
        await client.submit(["a"], model=name)


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
async def test_a_model_may_be_called_anything(client: Client, tmp_path: Path, name: str) -> None:
    model = unique(name)
    job = await client.submit(["a"], model=model)
    assert [found.job for found in await client.list(model=model)] == [job.id]
    assert await work(await client.state(), client.storage, model) == 3
    assert (await client.status(job)).model == model
    within(tmp_path, job.id)
    tags = Tags()
    tags.feed(page(gather(client.storage, job.id)))
    assert not tags.seen & {"marquee", "script"}


def within(tmp_path: Path, job: str) -> None:
    """Every file that was made is the job's, or the hint at it."""
    store = tmp_path / "a" / "b" / "store"
    for file in tmp_path.rglob("*"):
        if file.is_file():
            inside = str(file.relative_to(store))
            assert re.fullmatch(rf"jobs/{job}/[\w./~-]+|unfinished/[0-9a-f]+/{job}|\.[\w./-]+", inside), (
                inside
            )


async def test_ids_are_carried_through_and_do_nothing(
    client: Client, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    model = unique("model")
    folder = tmp_path / "a"
    file = folder / "$(touch harm) \x1b[2J'.jsonl"
    folder.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps({"prompt": "p", "id": name}) + "\n" for name in IDS))
    job = await client.submit(file, model=model, job_id=unique("job"))
    file.unlink()
    await work(await client.state(), client.storage, model)
    assert [row.custom_id for row in await client.results(job).list()] == IDS
    within(tmp_path, job.id)
    state = await client.state()
    keys = {key.decode() async for key in state.redis.scan_iter(f"*{{{job.id}}}*")}
    assert all(re.fullmatch(rf"pagemill:{{{job.id}}}(:\w+)?", key) for key in keys)
    tags = Tags()
    tags.feed(page(gather(client.storage, job.id)))
    assert "script" not in tags.seen
    await client.close()

    monkeypatch.chdir(tmp_path)
    place = ["--store", str(folder / "b" / "store")]
    for words in (["results", job.id, *place], ["status", job.id, *place, "--redis-url", redis_url]):
        assert await asyncio.to_thread(main, words) == 0
        out, _ = capsys.readouterr()
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", out)
    words = ["results", job.id, *place, "--format", "openai", "-o", "answers.jsonl"]
    assert await asyncio.to_thread(main, words) == 0
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == IDS
    assert not list(tmp_path.rglob("harm*"))
