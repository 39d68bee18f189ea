"""The synchronous form: the same client, from code without a loop, in threads, beside a running loop, after a
fork."""

from __future__ import annotations

import asyncio
import inspect
import pydoc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_worker import unique, work

from pagemill.jobs.client import Client
from pagemill.jobs.errors import JobNotFound
from pagemill.jobs.sync import SyncClient


@pytest.fixture
def client(redis_url: str, tmp_path: Path) -> Iterator[SyncClient]:
    with SyncClient(redis_url, str(tmp_path / "store")) as opened:
        yield opened


def finish(redis_url: str, tmp_path: Path, model: str) -> None:
    async def run() -> None:
        async with Client(redis_url, str(tmp_path / "store")) as client:
            await work(await client.state(), client.storage, model)

    asyncio.run(run())


def test_a_job_from_start_to_end(client: SyncClient, redis_url: str, tmp_path: Path) -> None:
    model = unique("model")
    job = client.submit((f"p{i}" for i in range(5)), model=model, max_tokens=4)
    assert job.status().state == "validating"
    with pytest.raises(TimeoutError):
        job.wait(timeout=0.05)
    watching = job.watch(poll=0.05)
    assert next(watching).state == "validating"
    finish(redis_url, tmp_path, model)
    assert [status.state for status in watching][-1] == "completed"
    assert client.wait(job).completed == 5
    assert [row.text for row in job.results()] == [f"answer to p{i}" for i in range(5)]
    assert client.results(job.id).table().num_rows == 5
    assert len(client.results(job).list()) == 5
    assert [found.job for found in client.list(model=model)] == [job.id]
    assert not client.cancel(job).accepted
    assert not [worker for worker in client.workers() if model in worker.models]


def test_errors_come_out_as_they_are(client: SyncClient) -> None:
    with pytest.raises(JobNotFound):
        client.status("job-that-never-was")


def test_a_watch_that_is_left_early_ends(client: SyncClient) -> None:
    job = client.submit(["a"], model=unique("model"))
    for _ in job.watch():
        break
    assert job.status().state == "validating"


async def test_it_works_beside_a_running_loop_as_in_a_notebook(client: SyncClient) -> None:
    job = client.submit(["a"], model=unique("model"))
    assert client.status(job).state == "validating"


def test_threads_share_one(client: SyncClient) -> None:
    model, ids = unique("model"), list[str]()
    threads = [
        threading.Thread(target=lambda: ids.append(client.submit(["a"], model=model).id)) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 6
    assert {job.job for job in client.list(model=model)} == set(ids)


def test_it_starts_again_after_it_was_closed(client: SyncClient) -> None:
    client.list(limit=1)
    client.close()
    client.close()
    client.list(limit=1)


OTHERS = {"submit": "SyncJob", "retry_failed": "SyncJob", "watch": "Iterator[JobStatus]"}


@pytest.mark.parametrize(
    "name",
    ["submit", "status", "openai_batch", "watch", "wait", "cancel", "delete", "retry_failed", "list",
     "workers", "recover", "recover_all"],
)  # fmt: skip
def test_each_method_has_the_arguments_and_the_manual_of_the_async_one_and_says_what_it_gives(
    name: str,
) -> None:
    ours, theirs = getattr(SyncClient, name), getattr(Client, name)
    signature, async_one = inspect.signature(ours), inspect.signature(theirs)
    assert signature.parameters == async_one.parameters
    assert signature.return_annotation == OTHERS.get(name, async_one.return_annotation)
    assert not inspect.iscoroutinefunction(ours)
    assert ours.__doc__ == theirs.__doc__


def test_help_names_the_handle_that_submit_gives() -> None:
    text = pydoc.plain(pydoc.render_doc(SyncClient.submit))
    assert "-> 'SyncJob'" in text
    assert "-> 'Job'" not in text


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")
from pagemill.jobs.sync import SyncClient
client = SyncClient(sys.argv[1], sys.argv[2])
client.list(limit=1)
child = os.fork()
if child == 0:
    client.list(limit=1)
    os._exit(0)
_, status = os.waitpid(child, 0)
client.list(limit=1)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_child_of_a_fork_gets_a_thread_of_its_own(redis_url: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, redis_url, str(tmp_path)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
