"""The commands that need no worker: what they print, what they end with, and that bad input is one
sentence."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from command_line import Run, finish, submitted
from fake_worker import say_alive

from pagemill.jobs.client import Client

# the path


def test_submit_status_results(run: Run, prompts: Path, model: str, redis_url: str, store: Path) -> None:
    job = submitted(run, prompts, model, "--max-tokens", 5, "--temperature", 0, "--set", "min_p=0.1")
    waiting = json.loads(run("status", job, "--json").out)
    assert (waiting["job"], waiting["state"], waiting["model"]) == (job, "validating", model)
    assert "no worker serves" in waiting["blocked_reason"]
    finish(redis_url, store, model)
    text = run("status", job).out
    assert "completed" in text
    assert "2 completed, 1 failed, of 3" in text
    table = run("results", job).out.splitlines()
    assert table[0] == "0\ta\tcompleted\tanswer to one"
    assert table[1].startswith("1\trow-1\tfailed\tinvalid_json_line: line 2")
    rows = [json.loads(line) for line in run("results", job, "--format", "jsonl").out.splitlines()]
    assert [row["row_index"] for row in rows] == [0, 1, 2]
    assert run("results", job, "--json").out == run("results", job, "--format", "jsonl").out


def test_submit_prints_the_id_alone_or_json(run: Run, prompts: Path, model: str) -> None:
    done = run("submit", prompts, "-m", model, "--job-id", f"j-{model}")
    assert done.out == f"j-{model}\n"
    again = run("submit", prompts, "-m", model, "--job-id", f"j-{model}", "--json")
    assert json.loads(again.out)["existed"] is True
    said = run("submit", prompts, "-m", model, "--job-id", f"j-{model}")
    assert (said.out, said.code) == (f"j-{model}\n", 0)
    assert "submitted before" in said.err
    other = run("submit", prompts, "-m", model, "--job-id", f"j-{model}", "--max-tokens", 3)
    assert other.code == 4
    assert "other parameters" in other.err


def test_openai_files(
    run: Run, prompts: Path, model: str, redis_url: str, store: Path, tmp_path: Path
) -> None:
    job = submitted(run, prompts, model)
    finish(redis_url, store, model)
    output = tmp_path / "answers.jsonl"
    done = run("results", job, "--format", "openai", "--output", output)
    assert done.code == 0
    assert "2 completed rows" in done.err
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["a", "row-2"]
    errors = [json.loads(line) for line in (tmp_path / "answers.errors.jsonl").read_text().splitlines()]
    assert [line["error"]["code"] for line in errors] == ["invalid_json_line"]
    named = tmp_path / "named.jsonl"
    printed = run("results", job, "--format", "openai", "--errors", named)
    assert len(printed.out.splitlines()) == 2
    assert len(named.read_text().splitlines()) == 1
    uncounted = run("results", job, "--format", "openai")
    assert "1 failed rows are not shown" in uncounted.err


def test_one_file_of_all_rows(
    run: Run, prompts: Path, model: str, redis_url: str, store: Path, tmp_path: Path
) -> None:
    job = submitted(run, prompts, model)
    finish(redis_url, store, model)
    place = tmp_path / "answers.csv"
    done = run("results", job, "--format", "csv", "--output", place)
    assert (done.code, done.out, done.err) == (0, "", f"3 rows in {place}\n")
    printed = run("results", job, "--format", "csv")
    assert printed.out == place.read_text()
    records = list(csv.DictReader(printed.out.splitlines()))
    assert [record["custom_id"] for record in records] == ["a", "row-1", "row-2"]
    assert [record["error_code"] for record in records] == ["", "invalid_json_line", ""]
    assert run("results", job, "--format", "csv", "--csv-safe").out == printed.out  # none is like a formula
    table = tmp_path / "answers.parquet"
    assert run("results", job, "--format", "parquet", "-o", table).err == f"3 rows in {table}\n"
    read = pq.read_table(table)
    assert read.column("custom_id").to_pylist() == ["a", "row-1", "row-2"]
    seeds = [str(seed or "") for seed in read.column("seed").to_pylist()]
    assert seeds == [record["seed"] for record in records]


def test_watch_prints_lines_when_piped_and_ends_as_the_job_does(
    run: Run, prompts: Path, model: str, redis_url: str, store: Path
) -> None:
    job = submitted(run, prompts, model)
    finish(redis_url, store, model)
    done = run("watch", job)
    assert done.code == 0
    assert (
        done.out.splitlines()[-1]
        == "completed · 2 completed, 1 failed, of 3 · tokens 6 in, 4 out · 1 invalid_json_line"
    )
    documents = [json.loads(line) for line in run("watch", job, "--json").out.splitlines()]
    assert documents[-1]["state"] == "completed"
    cancelled = submitted(run, prompts, model)
    assert run("cancel", cancelled).code == 0
    ended = run("watch", cancelled)
    assert ended.code == 9
    assert "ended as cancelled" in ended.err


def test_cancel_works_with_no_worker_and_is_harmless_to_repeat(
    run: Run, prompts: Path, model: str, redis_url: str, store: Path
) -> None:
    job = submitted(run, prompts, model)
    assert run("cancel", job).out == f"{job} is cancelled.\n"
    assert json.loads(run("cancel", job, "--json").out) == {"job": job, "state": "cancelled"}
    done = submitted(run, prompts, model)
    finish(redis_url, store, model)
    refused = run("cancel", done)
    assert refused.code == 4
    assert "has ended (completed): there is nothing left to cancel" in refused.err

    async def alive() -> None:
        async with Client(redis_url, str(store)) as client:
            await say_alive(await client.state(), model)

    asyncio.run(alive())
    assert "is cancelling" in run("cancel", submitted(run, prompts, model)).out


def test_recover_brings_back_what_redis_has_lost(
    run: Run, prompts: Path, model: str, redis_url: str, store: Path
) -> None:
    jobs = [submitted(run, prompts, model) for _ in range(2)]

    async def lose() -> None:
        async with Client(redis_url, str(store)) as client:
            redis = (await client.state()).redis
            for job in jobs:
                await redis.delete(*[key async for key in redis.scan_iter(f"pagemill:{{{job}}}*")])

    asyncio.run(lose())
    lost = run("status", jobs[0])
    assert (lost.code, "validating" in lost.out) == (0, True)
    blocked = json.loads(run("status", jobs[0], "--json").out)["blocked_reason"]
    assert blocked == f"Redis has lost this job: a worker rebuilds it, or `pagemill recover {jobs[0]}`."
    done = run("recover", jobs[0])
    assert done.out == f"{jobs[0]}\n", done.err
    assert "nothing to rebuild" in run("recover", jobs[0]).err
    assert json.loads(run("recover", "--all", "--json").out) == {"rebuilt": jobs[1:]}
    finish(redis_url, store, model)
    for job in jobs:
        assert json.loads(run("status", job, "--json").out)["state"] == "completed"
    assert run("recover").code == 2
    assert run("recover", "job-none").code == 3


def test_list_shows_the_newest_first(run: Run, prompts: Path, model: str) -> None:
    jobs = [submitted(run, prompts, model) for _ in range(2)]
    lines = run("list", "--model", model).out.splitlines()
    assert lines[0].split("\t") == ["job", "state", "model", "completed", "failed", "rows", "created"]
    assert [line.split("\t")[0] for line in lines[1:]] == jobs[::-1]
    assert [job["job"] for job in json.loads(run("list", "-m", model, "-n", 1, "--json").out)] == jobs[1:]
    assert json.loads(run("list", "-m", model, "--state", "failed", "--json").out) == []


def test_partial_results_of_a_running_job(
    run: Run, prompts: Path, model: str, redis_url: str, store: Path
) -> None:
    job = submitted(run, prompts, model)
    finish(redis_url, store, model, tasks=1)
    early = run("results", job)
    assert early.code == 4
    assert "not ended" in early.err
    assert "--partial" in early.err
    assert len(run("results", job, "--partial").out.splitlines()) == 1


def test_results_need_no_redis(run: Run, prompts: Path, model: str, redis_url: str, store: Path) -> None:
    job = submitted(run, prompts, model)
    finish(redis_url, store, model)
    assert run("results", job, "--redis-url", "redis://127.0.0.1:1/0").code == 0


def test_results_asked_of_the_wrong_store_are_pointed_to_the_right_one(
    run: Run, prompts: Path, model: str, store: Path, tmp_path: Path
) -> None:
    job = submitted(run, prompts, model)
    done = run("results", job, "--store", tmp_path / "other")
    assert done.code == 3
    assert f"{store.as_uri()}/jobs/{job}" in done.err


def test_what_a_model_says_cannot_move_the_cursor(
    run: Run, tmp_path: Path, model: str, redis_url: str, store: Path
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"prompt": "\x1b[2J\a\n\tx"}) + "\n")
    job = submitted(run, file, model)
    finish(redis_url, store, model)
    out = run("results", job).out
    assert "\x1b" not in out
    assert out == "0\trow-0\tcompleted\tanswer to \\x1b[2J\\x07\\n\\tx\n"


def test_a_job_is_deleted_and_its_failed_rows_are_not_lost(
    run: Run, prompts: Path, model: str, store: Path
) -> None:
    job = submitted(run, prompts, model)
    refused = run("delete", job)
    assert (refused.code, "cancel it first" in refused.err) == (4, True)
    assert run("retry-failed", job).code == 4
    assert run("cancel", job).code == 0
    empty = run("retry-failed", job)
    assert (empty.code, "was cancelled before its lines became rows" in empty.err) == (2, True)
    assert run("delete", job).out == f"{job} is deleted.\n"
    assert json.loads(run("delete", job, "--json").out) == {"job": job, "deleted": True}
    assert run("status", job).code == 3
    assert run("delete", submitted(run, prompts, model), "--force").code == 0


# bad input: one sentence on standard error, a code that says of what kind, and no traceback


DOWN = "redis://127.0.0.1:1/0"
BAD: list[tuple[str, list[str], int, str]] = [
    ("no command of that name", ["sumbit"], 2, "No such command"),
    ("no option of that name", ["status", "x", "--nope"], 2, "No such option"),
    ("a missing argument", ["status"], 2, "Missing argument"),
    ("a missing model", ["submit", "{file}"], 2, "--model"),
    ("a missing file", ["submit", "none.jsonl", "-m", "m"], 2, "There is no file none.jsonl"),
    ("a folder", ["submit", "{folder}", "-m", "m"], 2, "is a folder"),
    ("a file of another format", ["submit", "a.xlsx", "-m", "m"], 2, "spreadsheet"),
    ("an address of another kind", ["submit", "ftp://host/a.jsonl", "-m", "m"], 2, "ftp://"),
    ("an object that is not there", ["submit", "file:///none.jsonl", "-m", "m"], 2, "There is no file"),
    ("an empty model", ["submit", "{file}", "-m", ""], 2, "model"),
    ("a parameter out of range", ["submit", "{file}", "-m", "m", "--temperature", "9"], 2, "--temperature"),
    ("a parameter that is none", ["submit", "{file}", "-m", "m", "--set", "colour=red"], 2, "colour"),
    ("a parameter without a value", ["submit", "{file}", "-m", "m", "--set", "min_p"], 2, "--set min_p"),
    ("a parameter twice", ["submit", "{file}", "-m", "m", "--top-k", "1", "--set", "top_k=2"], 2, "twice"),
    ("a word for a number", ["submit", "{file}", "-m", "m", "--priority", "high"], 2, "--priority"),
    ("no time", ["submit", "{file}", "-m", "m", "--deadline", "soon"], 2, "--deadline soon"),
    ("a bad id", ["submit", "{file}", "-m", "m", "--job-id", "a/b"], 2, "not a job id"),
    ("an unknown job", ["status", "job-none"], 3, "There is no job job-none"),
    ("an unknown job to watch", ["watch", "job-none"], 3, "There is no job"),
    ("an unknown job to cancel", ["cancel", "job-none"], 3, "There is no job"),
    ("an unknown job to read", ["results", "job-none"], 3, "There is no job"),
    ("an id that is none", ["status", "../../etc"], 2, "not a job id"),
    ("an id that is none, read", ["results", "a b"], 2, "not a job id"),
    ("a state that is none", ["list", "--state", "happy"], 2, "happy is no state"),
    ("a limit of nothing", ["list", "-n", "0"], 2, "--limit"),
    ("a format that is none", ["results", "job-none", "--format", "xml"], 2,
     "'--format' / '-f': 'xml' is not one of 'table', 'jsonl', 'csv', 'parquet', 'openai'; see"),
    ("a format of a status that is none", ["status", "job-none", "--format", "xml"], 2,
     "'--format' / '-f': 'xml' is not one of 'text', 'json', 'openai'; see"),
    ("a table in a file", ["results", "job-none", "--output", "t"], 2, "csv, parquet, jsonl or openai"),
    ("Parquet without a file", ["results", "job-none", "--format", "parquet"], 2, "needs --output FILE"),
    ("Parquet to standard output", ["results", "job-none", "--format", "parquet", "-o", "-"], 2, "--output"),
    ("CSV's own flag", ["results", "job-none", "--csv-safe"], 2, "goes with --format csv"),
    ("two formats", ["results", "job-none", "--json", "--format", "csv"], 2, "does not go with csv"),
    ("errors without their format", ["results", "job-none", "--errors", "e"], 2, "--errors"),
    ("Redis down", ["list", "--redis-url", DOWN], 6, "127.0.0.1:1"),
    ("Redis down, submitting", ["submit", "{file}", "-m", "m", "--redis-url", DOWN], 6, "127.0.0.1:1"),
    ("no address of Redis", ["list", "--redis-url", "localhost:6379"], 2, "--redis-url"),
    ("no socket", ["list", "--redis-url", "unix:///none.sock"], 6, "none.sock"),
    ("a store of another kind", ["list", "--store", "gs://bucket"], 5, "gs://"),
    ("an endpoint without scheme", ["list", "--store", "s3://bucket", "--s3-endpoint", "host:9000"], 5, "http://"),
    ("a file for a store", ["submit", "{file}", "-m", "m", "--store", "{file}"], 5, "file is where a folder"),
    ("a store that is not there", ["results", "job-none", "--store", "/none/store"], 3, "There is no job"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "said"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_one_sentence(
    run: Run, prompts: Path, tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    done = run(*(word.format(file=prompts, folder=tmp_path) for word in words))
    assert done.code == code, done.err
    assert done.err.startswith("pagemill: ")
    assert len(done.err.splitlines()) == 1, done.err
    assert said in done.err
    assert "Traceback" not in done.err
    assert "Value error" not in done.err
    assert done.out == ""


def test_storage_that_refuses_is_said(
    run: Run, prompts: Path, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PAGEMILL_S3_SECRET_KEY", "wrong")
    wrong = run("submit", prompts, "-m", "m", "--store", s3.url)
    assert (wrong.code, len(wrong.err.splitlines())) == (5, 1)
    assert "wrong" not in wrong.err
    monkeypatch.setenv("PAGEMILL_S3_SECRET_KEY", s3.secret_key)
    missing = run("submit", prompts, "-m", "m", "--store", "s3://no-such-bucket-here/x")
    assert (missing.code, len(missing.err.splitlines())) == (5, 1)
    assert "no-such-bucket-here" in missing.err


@pytest.mark.parametrize("place", ["{folder}", "{folder}/none/out.jsonl"])
def test_output_that_cannot_be_written_is_said(
    run: Run, prompts: Path, model: str, redis_url: str, store: Path, tmp_path: Path, place: str
) -> None:
    job = submitted(run, prompts, model)
    finish(redis_url, store, model)
    done = run("results", job, "--format", "jsonl", "--output", place.format(folder=tmp_path))
    assert (done.code, len(done.err.splitlines())) == (2, 1)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_a_full_disk_is_said(run: Run, prompts: Path, model: str, redis_url: str, store: Path) -> None:
    job = submitted(run, prompts, model)
    finish(redis_url, store, model)
    for format in ("jsonl", "csv", "parquet"):
        done = run("results", job, "--format", format, "--output", "/dev/full")
        assert done.code == 5, format
        assert "disk is full" in done.err


def test_help_tells_the_exit_codes_and_needs_no_redis(run: Run) -> None:
    for words in ([], ["--help"], ["submit", "-h"], ["results", "--help"]):
        done = run(*words)
        assert done.code == 0
        assert "Exit codes" in done.out
    assert run("--version").out.startswith("pagemill 0")
