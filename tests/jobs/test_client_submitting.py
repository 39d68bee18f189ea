"""Submitting through the client: whatever is submitted, from anywhere, and the same again, against
a real Redis and a local store."""

from __future__ import annotations

import asyncio
import gzip
import io
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fake_worker import finish, unique, work

from pagemill.jobs import layout
from pagemill.jobs.client import Client
from pagemill.jobs.errors import JobConflict, UsageError
from pagemill.jobs.inputs import open_source
from pagemill.jobs.storage import StorageOptions, read_json
from pagemill.jobs.submission import accept


def objects(client: Client, job: str) -> list[str]:
    root = layout.root(job)
    return [info.key.removeprefix(root) for info in client.storage.list(root)]


# submitting


async def test_every_kind_of_row_comes_back_in_input_order(client: Client, model: str) -> None:
    prompts: list[Any] = [
        "as text",
        [1, 2, 3],
        [{"role": "user", "content": "as messages"}],
        {"prompt": "as a line", "id": "mine", "max_tokens": 1},
        {
            "custom_id": "theirs",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "as a request"},
        },
        {"prompt": 5},
    ]
    job = await client.submit(prompts, model=model, max_tokens=7)
    assert (await job.status()).state == "validating"
    await finish(client, model)
    assert (await job.wait()).state == "completed"
    rows = await job.results().list()
    assert [row.row_index for row in rows] == list(range(6))
    assert [row.custom_id for row in rows] == ["row-0", "row-1", "row-2", "mine", "theirs", "row-5"]
    assert rows[0].text == "answer to as text"
    assert rows[1].text == "answer to [1, 2, 3]"
    assert [row.error_code for row in rows] == [None] * 5 + ["invalid_request"]


LINES = b'{"prompt": "one"}\n{"prompt": "two"}\n'


async def asynchronously(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        await asyncio.sleep(0)
        yield item


@pytest.mark.parametrize(
    "kind",
    [
        "path",
        "text path",
        "uri",
        "gz",
        "bytes",
        "file",
        "packed stream",
        "generator",
        "async",
        "chunks",
        "async chunks",
    ],
)
async def test_the_same_rows_from_anywhere(client: Client, model: str, tmp_path: Path, kind: str) -> None:
    plain, packed = tmp_path / "in put.jsonl", tmp_path / "input.jsonl.gz"
    plain.write_bytes(LINES)
    packed.write_bytes(gzip.compress(LINES))
    sources: dict[str, Any] = {
        "path": plain,
        "text path": str(plain),
        "uri": plain.as_uri(),
        "gz": packed,
        "bytes": LINES,
        "file": io.BytesIO(LINES),
        "packed stream": io.BytesIO(packed.read_bytes()),
        "generator": (prompt for prompt in ("one", "two")),
        "async": asynchronously(["one", "two"]),
        "chunks": [LINES[:5], LINES[5:]],
        "async chunks": asynchronously([LINES[:5], LINES[5:]]),
    }
    name = "input.jsonl.gz" if kind == "packed stream" else None
    job = await client.submit(sources[kind], model=model, name=name)
    await finish(client, model)
    assert [row.text for row in await job.results().list()] == ["answer to one", "answer to two"]


async def test_input_is_read_from_s3_and_results_are_kept_there(redis_url: str, model: str, s3: Any) -> None:
    async with Client(redis_url, s3.url, storage_options=s3.options) as client:
        await asyncio.to_thread(client.storage.put, "in/prompts.jsonl", LINES)
        job = await client.submit(f"{s3.url}/in/prompts.jsonl", model=model)
        await finish(client, model)
        assert [row.text for row in await job.results().list()] == ["answer to one", "answer to two"]
        assert (await job.status()).output == f"{s3.url}/jobs/{job.id}"
        with pytest.raises(UsageError, match="There is no object"):
            await client.submit(f"{s3.url}/in/none.jsonl", model=model)


async def test_rows_are_streamed_into_the_store(client: Client, model: str) -> None:
    """A piece is on its way before the last row was made, so an input of any length fits into memory."""
    sizes: list[int] = []
    seen_while_making: list[int] = []

    def rows() -> Iterator[str]:
        for _ in range(40):
            seen_while_making.append(len(sizes))
            yield "x" * 100_000

    job = await client.submit(rows(), model=model, progress=sizes.append)
    assert seen_while_making[-1] > 0
    assert max(sizes) < 2 << 20
    spec = read_json(client.storage, layout.job(job.id))
    assert spec is not None
    assert spec["input"]["size"] == sum(sizes)


async def test_an_item_that_is_no_row_is_a_row_s_fault_and_ends_nothing(client: Client, model: str) -> None:
    """The millionth item of a generator must not end what was sent before it."""
    items = ["one", 7, None, {"prompt": object()}, {"prompt": "two"}]
    job = await client.submit((item for item in items), model=model)
    await finish(client, model)
    rows = await job.results().list()
    assert [row.error_code for row in rows] == [None, *["invalid_request"] * 3, None]
    assert rows[1].error_message == ("line 2: the row is an int: give text, token ids, messages, or a dict")
    assert str(rows[3].error_message).startswith("line 4: the row cannot be written as JSON: Object of type")
    named = await client.submit([{"q": "one"}, "two"], model=model, prompt_column="q")
    await finish(client, model)
    rows = await named.results().list()
    assert rows[0].status == "completed"
    assert "with prompt_column, template or id_column each is a dict" in str(rows[1].error_message)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("no/such/file.jsonl", "There is no file"),
        ("What is this?", "in a list"),
        (".", "is a folder"),
        ("https://example.org/a.jsonl", "not https"),
        ("table.xlsx", "spreadsheet"),
        ({"prompt": "x"}, "in a list"),
        (io.StringIO("x"), "mode 'rb'"),
        ([None], "Of the first item: the row is a NoneType: give text, token ids, messages, or a dict"),
        ([7, "a"], "Of the first item: the row is an int"),
        ([{"prompt": object()}], "Of the first item: the row cannot be written as JSON"),
        ([b"{}\n", "x"], "mixes bytes"),
        (7, "Cannot take prompts from an int"),
        ("s3://bucket", "names no object"),
    ],
)
async def test_what_is_no_input_is_said_in_a_sentence_and_leaves_no_job(
    client: Client, model: str, tmp_path: Path, prompts: Any, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        await client.submit(prompts, model=model)
    assert not list(client.storage.list("jobs/"))
    assert not await client.list(model=model)


async def test_bad_parameters_are_refused_before_anything_is_stored(client: Client, model: str) -> None:
    for wrong in ({"temperature": 9.0}, {"seed": -1}, {"defaults": {"nonsense": 1}}, {"priority": 10**9}):
        with pytest.raises(UsageError):
            await client.submit(["x"], model=model, **wrong)  # type: ignore[arg-type]
    for model_name in ("", "  ", "a\nb", "a\x1b[2J"):
        with pytest.raises(UsageError):
            await client.submit(["x"], model=model_name)
    with pytest.raises(UsageError, match="not a job id"):
        await client.submit(["x"], model=model, job_id="../up")
    assert not list(client.storage.list("jobs/"))


async def test_an_explicit_zero_is_a_value(client: Client, model: str) -> None:
    job = await client.submit(["x"], model=model, temperature=0, top_k=0, defaults={"presence_penalty": 0})
    spec = read_json(client.storage, layout.job(job.id))
    assert spec is not None
    assert spec["defaults"] == {"temperature": 0, "top_k": 0, "presence_penalty": 0}


async def test_limits_go_into_the_job(client: Client, model: str) -> None:
    job = await client.submit(
        ["short", "x" * 200], model=model, max_line_bytes=100, shard_rows=1, retention=60
    )
    await finish(client, model)
    assert [row.error_code for row in await job.results().list()] == [None, "line_too_long"]
    spec = read_json(client.storage, layout.job(job.id))
    assert spec is not None
    assert (spec["retention_s"], spec["shard_rows"]) == (60, 1)


async def test_deadlines_are_spans_or_moments_with_a_zone(client: Client, model: str) -> None:
    for deadline in (3600, timedelta(hours=1), datetime.now(UTC) + timedelta(hours=1)):
        job = await client.submit(["x"], model=model, deadline=deadline)
        expires = (await job.status()).expires_at
        assert expires is not None
        assert 3500 < expires - time.time() < 3700
    with pytest.raises(UsageError, match="zone"):
        await client.submit(["x"], model=model, deadline=datetime(2100, 1, 1))
    with pytest.raises(UsageError, match="passed"):
        await client.submit(["x"], model=model, deadline=-5)


# the same again (D21)


async def test_the_same_submission_under_an_id_is_the_same_job(client: Client, model: str) -> None:
    name = unique("job")
    first = await client.submit(["a", "b"], model=model, job_id=name)
    again = await client.submit(["a", "b"], model=model, job_id=name)
    assert (first.existed, again.existed) == (False, True)
    assert again == first
    assert sum(key.startswith("input") for key in objects(client, name)) == 1
    await finish(client, model)
    after = await client.submit(["a", "b"], model=model, job_id=name)
    assert after.existed
    assert (await after.status()).state == "completed"
    assert len(await after.results().list()) == 2


@pytest.mark.parametrize(
    "change",
    [{"prompts": ["a", "c"]}, {"model": "another"}, {"max_tokens": 3}, {"seed": 1}, {"strict": True}],
)
async def test_something_else_under_an_id_is_a_conflict_and_harms_nothing(
    client: Client, model: str, change: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"prompts": ["a", "b"], "model": model, "job_id": unique("job"), "seed": 0}
    job = await client.submit(**given)
    before = {key: client.storage.get(layout.root(job.id) + key) for key in objects(client, job.id)}
    with pytest.raises(JobConflict, match="exists already with other"):
        await client.submit(**given | change)
    after = {key: client.storage.get(layout.root(job.id) + key) for key in objects(client, job.id)}
    assert before == after
    await client.submit(["a"], model=model, idempotency_key=job.id)
    with pytest.raises(JobConflict, match="choose another idempotency key"):
        await client.submit(["b"], model=model, idempotency_key=job.id)
    await finish(client, model)
    assert (await job.wait()).completed == 2


async def test_pace_and_time_do_not_make_another_job(client: Client, model: str) -> None:
    name = unique("job")
    await client.submit(["a"], model=model, job_id=name)
    again = await client.submit(["a"], model=model, job_id=name, priority=5, deadline=60, max_shards=1)
    assert again.existed


async def test_an_empty_idempotency_key_is_refused(client: Client, model: str) -> None:
    with pytest.raises(UsageError, match="key is empty"):
        await client.submit(["a"], model=model, idempotency_key="")


async def test_an_idempotency_key_names_the_job(client: Client, model: str) -> None:
    key = f"order 7/ü {unique('k')}"
    first = await client.submit(["a"], model=model, idempotency_key=key)
    again = await client.submit(["a"], model=model, idempotency_key=key)
    assert (again.id, again.existed) == (first.id, True)
    with pytest.raises(JobConflict):
        await client.submit(["b"], model=model, idempotency_key=key)
    with pytest.raises(UsageError, match="not both"):
        await client.submit(["a"], model=model, idempotency_key=key, job_id="x")


async def test_many_senders_of_one_id_make_one_job(client: Client, model: str, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(LINES)
    name = unique("job")
    jobs = await asyncio.gather(*(client.submit(file, model=model, job_id=name) for _ in range(8)))
    assert {job.id for job in jobs} == {name}
    assert sum(not job.existed for job in jobs) == 1
    spec = read_json(client.storage, layout.job(name))
    assert spec is not None
    inputs = [key for key in objects(client, name) if key.startswith("input")]
    assert inputs == [spec["input"]["key"].removeprefix(layout.root(name))]
    await finish(client, model)
    assert (await jobs[0].wait()).completed == 2


async def test_a_sender_that_died_before_redis_was_told_submits_again(client: Client, model: str) -> None:
    name = unique("job")
    fields = {"model": model, "created_at": time.time(), "seed": 3}
    await accept(client.storage, open_source(["a", "b"], StorageOptions()), name, fields, chosen=True)
    status = await client.status(name)
    assert (status.state, status.total, status.model) == ("validating", 0, model)
    assert f"pagemill recover {name}" in status.blocked_reason
    job = await client.submit(["a", "b"], model=model, job_id=name, seed=3)
    assert job.existed
    await finish(client, model)
    assert (await job.wait()).completed == 2


async def forget(client: Client, job: str) -> None:
    """What a flush of Redis does to one job."""
    state = await client.state()
    await state.redis.delete(*[key async for key in state.redis.scan_iter(f"pagemill:{{{job}}}*")])
    assert await state.status(job) is None


async def test_a_job_that_redis_has_just_lost_is_shown_as_its_objects_say(client: Client, model: str) -> None:
    job = await client.submit(["a", "b", "c", "d"], model=model, shard_rows=2)
    await work(await client.state(), client.storage, model, tasks=2)  # the plan and one of its two shards
    before = await client.status(job)
    await forget(client, job.id)
    after = await client.status(job)
    assert "Redis has lost this job" in after.blocked_reason
    for name in ("state", "model", "total", "completed", "failed", "completion_tokens", "shards_total",
                 "shards_done", "created_at", "output"):  # fmt: skip
        assert getattr(after, name) == getattr(before, name), name
    assert (after.state, after.completed, after.total) == ("in_progress", 2, 4)
    assert await client.recover(job)
    assert "has lost" not in (await client.status(job)).blocked_reason
    await finish(client, model)
    assert (await job.wait()).completed == 4


async def test_a_job_that_redis_has_lost_can_be_cancelled(client: Client, model: str) -> None:
    job = await client.submit(["a", "b", "c", "d"], model=model, shard_rows=2)
    await work(await client.state(), client.storage, model, tasks=2)
    await forget(client, job.id)
    assert (await client.cancel(job)).accepted
    status = await job.wait(timeout=30)
    assert (status.state, status.completed, status.failed) == ("cancelled", 2, 2)


async def test_what_ended_and_was_forgotten_by_redis_is_not_run_again(client: Client, model: str) -> None:
    name = unique("job")
    job = await client.submit(["a", "b"], model=model, job_id=name)
    await finish(client, model)
    before = await job.status()
    await forget(client, name)
    again = await client.submit(["a", "b"], model=model, job_id=name)
    assert again.existed
    assert await (await client.state()).status(name) is None
    after = await again.status()
    assert (after.state, after.total, after.completed, after.output) == ("completed", 2, 2, before.output)
    assert after.prompt_tokens == before.prompt_tokens
    assert [row.text for row in await again.results().list()] == ["answer to a", "answer to b"]


async def test_an_id_that_was_deleted_is_not_used_again(client: Client, model: str) -> None:
    name = unique("job")
    client.storage.put(layout.tombstone(name), b"{}")
    with pytest.raises(JobConflict, match="deleted"):
        await client.submit(["a"], model=model, job_id=name)
