"""The client against a real Redis and a local store: whatever is submitted, and whatever happens on the
way."""

from __future__ import annotations

import asyncio
import gzip
import io
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_worker import say_alive, seal_some, take, unique, work

from pagemill.jobs import layout
from pagemill.jobs.client import Client, Job
from pagemill.jobs.errors import (
    JobConflict,
    JobFailed,
    JobNotFound,
    ProtocolMismatch,
    RedisUnavailable,
    StorageError,
    UsageError,
)
from pagemill.jobs.inputs import open_source
from pagemill.jobs.result import SCHEMA
from pagemill.jobs.storage import StorageOptions, read_json
from pagemill.jobs.submission import accept


@pytest.fixture
async def client(redis_url: str, tmp_path: Path) -> AsyncIterator[Client]:
    async with Client(redis_url, str(tmp_path / "store")) as opened:
        yield opened


@pytest.fixture
def model() -> str:
    return unique("model")


async def finish(client: Client, model: str) -> None:
    await work(await client.state(), client.storage, model)


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


# following


async def test_watching_shows_every_change_up_to_the_end(client: Client, model: str) -> None:
    job = await client.submit(["a", "b"], model=model)
    working = asyncio.create_task(finish(client, model))
    seen = [status async for status in job.watch(poll=0.05)]
    await working
    assert seen[-1].state == "completed"
    order = ["validating", "in_progress", "finalizing", "completed"]
    places = [order.index(status.state) for status in seen]
    assert places == sorted(places)
    assert all(a != b for a, b in pairwise(seen))


async def test_a_watcher_waits_for_a_redis_that_is_away(
    redis_server: Any, tmp_path: Path, model: str
) -> None:
    async with Client(redis_server.url, str(tmp_path / "store"), patience=0.2) as client:
        job = await client.submit(["a"], model=model)
        seen: list[str] = []

        async def watch() -> None:
            async for status in job.watch(poll=0.05):
                seen.append(status.state)

        watching = asyncio.create_task(watch())
        while not seen:
            await asyncio.sleep(0.01)
        redis_server.kill()
        with pytest.raises(RedisUnavailable):
            await client.status(job)
        redis_server.start()
        while await work(await client.state(), client.storage, model) == 0:
            await asyncio.sleep(0.05)
        await watching
        assert seen[-1] == "completed"


async def test_waiting_has_a_limit_and_leaves_the_job_alone(client: Client, model: str) -> None:
    job = await client.submit(["a"], model=model)
    with pytest.raises(TimeoutError, match="goes on"):
        await job.wait(timeout=0.05)
    assert (await job.status()).state == "validating"


async def test_a_failed_job_says_why(client: Client, model: str) -> None:
    job = await client.submit([], model=model)
    await finish(client, model)
    assert (await job.wait()).error_code == "empty_file"
    with pytest.raises(JobFailed, match="no line") as caught:
        await job.wait(check=True)
    assert caught.value.code == "empty_file"


async def test_results_of_a_running_job_are_partial_or_refused(client: Client, model: str) -> None:
    job = await client.submit(["a", {"prompt": 1}], model=model)
    await work(await client.state(), client.storage, model, tasks=1)
    with pytest.raises(JobConflict, match="not ended"):
        await job.results().list()
    assert [row.row_index async for row in job.results(partial=True)] == [1]
    await finish(client, model)
    assert [row.row_index async for row in job.results(partial=True)] == [0, 1]


async def test_results_come_as_arrow_too(client: Client, model: str) -> None:
    job = await client.submit([f"p{i}" for i in range(700)], model=model)
    await finish(client, model)
    table = await job.results().table()
    assert table.schema == SCHEMA
    assert table.column("row_index").to_pylist() == list(range(700))
    assert sum([batch.num_rows async for batch in job.results().batches()]) == 700
    assert [row.row_index async for row in job.results()] == list(range(700))


async def test_unknown_jobs_are_not_found(client: Client) -> None:
    for call in (client.status, client.cancel, client.wait):
        with pytest.raises(JobNotFound):
            await call("job-that-never-was")
    with pytest.raises(JobNotFound):
        await client.results("job-that-never-was").list()
    with pytest.raises(UsageError):
        await client.status("no/id")


async def test_listing_filters_by_state_and_model(client: Client, model: str) -> None:
    jobs: list[Job] = [await client.submit(["a"], model=model) for _ in range(3)]
    await client.cancel(jobs[0])
    assert [found.job for found in await client.list(model=model)] == [job.id for job in reversed(jobs)]
    assert [found.job for found in await client.list(model=model, state="cancelled")] == [jobs[0].id]
    assert len(await client.list(model=model, limit=2)) == 2


# cancelling (D20)


async def test_a_job_is_cancelled_before_any_worker_ran(client: Client, model: str) -> None:
    job = await client.submit(["a", "b"], model=model)
    outcome = await job.cancel()
    assert (outcome.state, outcome.accepted) == ("cancelled", True)
    status = await job.status()
    assert (status.state, status.total) == ("cancelled", 0)
    assert await job.results().list() == []
    assert (await job.cancel()).accepted  # and again
    assert await work(await client.state(), client.storage, model) == 0


async def test_cancelling_keeps_what_is_finished(client: Client, model: str) -> None:
    job = await client.submit(["a", "b", "c", "d", {"prompt": 0}], model=model)
    state = await client.state()
    await work(state, client.storage, model, tasks=1)
    lease = await take(state, model)
    assert lease is not None
    await seal_some(state, client.storage, lease, 3)
    outcome = await job.cancel()
    assert (outcome.state, outcome.accepted) == ("cancelled", True)
    rows = await job.results().list()
    assert [row.row_index for row in rows] == [0, 1, 2, 3, 4]
    codes = sorted(row.error_code or "" for row in rows)
    assert codes == ["", "", "", "batch_cancelled", "invalid_request"]
    status = await job.status()
    assert (status.total, status.completed, status.failed) == (5, 3, 2)


async def test_a_live_worker_is_left_to_drain_the_job(client: Client, model: str) -> None:
    job = await client.submit(["a"], model=model)
    state = await client.state()
    worker = await say_alive(state, model)
    outcome = await job.cancel()
    assert (outcome.state, outcome.accepted) == ("cancelling", True)
    assert read_json(client.storage, layout.stop(job.id)) is not None
    await state.goodbye(worker)
    assert (await job.cancel()).state == "cancelled"


async def test_what_has_ended_is_not_cancelled(client: Client, model: str) -> None:
    job = await client.submit(["a"], model=model)
    await finish(client, model)
    outcome = await job.cancel()
    assert (outcome.state, outcome.accepted) == ("completed", False)
    assert read_json(client.storage, layout.stop(job.id)) is None


# surroundings


async def test_redis_down_is_one_sentence_and_nothing_is_uploaded(tmp_path: Path) -> None:
    async with Client("redis://127.0.0.1:1/0", str(tmp_path / "store"), patience=0.1) as client:
        with pytest.raises(RedisUnavailable, match=r"127\.0\.0\.1:1"):
            await client.submit(["a"], model="m")
        assert not list(client.storage.list("jobs/"))


async def test_another_protocol_is_refused(redis_server: Any, tmp_path: Path) -> None:
    async with Client(redis_server.url, str(tmp_path)) as client:
        state = await client.state()
        await state.redis.set("pagemill:protocol", "99")
    async with Client(redis_server.url, str(tmp_path)) as client:
        with pytest.raises(ProtocolMismatch):
            await client.list()


def test_addresses_are_checked_when_the_client_is_made() -> None:
    with pytest.raises(UsageError, match="not a Redis address"):
        Client("http://localhost:6379")
    with pytest.raises(StorageError, match="no store"):
        Client("redis://localhost", "gs://bucket")


async def test_a_store_that_cannot_be_written_is_said(redis_url: str, tmp_path: Path, model: str) -> None:
    (tmp_path / "file").write_text("in the way")
    async with Client(redis_url, str(tmp_path / "file" / "store")) as client:
        with pytest.raises(StorageError):
            await client.submit(["a"], model=model)
