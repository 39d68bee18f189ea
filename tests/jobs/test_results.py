from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyarrow.csv import ConvertOptions, read_csv
from result_rows import done, failed
from stored_job import commit, plan_job, prompts, results, store_job

from pagemill.jobs import layout
from pagemill.jobs.errors import JobConflict, JobNotFound, StorageError
from pagemill.jobs.finalize import finalize
from pagemill.jobs.parquet import SCHEMA, batch_of
from pagemill.jobs.result import ResultRow
from pagemill.jobs.results import iter_batches, iter_results, to_csv, to_jsonl, to_openai
from pagemill.jobs.spec import JobSpec
from pagemill.jobs.storage import Storage, encode_json, read_json


def lines(output: io.BytesIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.getvalue().split(b"\n") if line]


def started(storage: Storage, count: int = 30, shards: int | None = None) -> tuple[JobSpec, dict[str, Any]]:
    """A job of shards that each span the whole file; the first few of them are committed."""
    shared = [json.dumps({"prompt": f"{'abcde'[i % 5]} is for {i}"}) for i in range(count - 1)]
    spec = store_job(storage, [*shared, "no json"], shard_rows=7)
    plan = plan_job(storage, spec)
    for entry in plan["shards"][:shards]:
        commit(storage, spec, entry)
    return spec, plan


def test_results_come_in_the_order_of_the_input(storage: Storage) -> None:
    spec, plan = started(storage)
    finalize(storage, spec, plan)
    rows = list(iter_results(storage, spec.job))
    assert [row.row_index for row in rows] == list(range(30))
    assert [row.text for row in rows[:29]] == [f"answer {i}" for i in range(29)]
    assert rows[29].error_code == "invalid_json_line"
    manifest = read_json(storage, layout.manifest(spec.job))
    assert manifest is not None
    spans = [(part["min_row_index"], part["max_row_index"]) for part in manifest["parts"]]
    assert any(a < c < b for a, b in spans for c, _ in spans), "the parts should overlap"


def test_many_parts_are_read_in_order(local_storage: Storage) -> None:
    """More parts than are read at once, every one of them over the whole range."""
    count = 160
    spec = store_job(local_storage, prompts(count), shard_rows=2)
    plan = plan_job(local_storage, spec)
    parts = []
    entries = plan["shards"]
    assert len(entries) > 64
    for number, entry in enumerate(entries):
        indexes = range(number, count, len(entries))
        record = commit_rows(local_storage, spec, entry, [done(i) for i in indexes])
        parts.append(record["part"])
    manifest = {"parts": parts, "version": 1}
    local_storage.put(layout.manifest(spec.job), encode_json(manifest))
    assert [row.row_index for row in iter_results(local_storage, spec.job)] == list(range(count))


def commit_rows(
    storage: Storage, spec: JobSpec, entry: dict[str, Any], rows: list[ResultRow]
) -> dict[str, Any]:
    from pagemill.jobs.commit import commit_shard

    expected = {row.row_index for row in rows}
    return commit_shard(
        storage, spec.job, entry, fence="0-9", segments=(), rows=rows, expected_row_indexes=expected
    )


def test_batches_have_the_one_schema(local_storage: Storage) -> None:
    spec, plan = started(local_storage)
    finalize(local_storage, spec, plan)
    batches = list(iter_batches(local_storage, spec.job))
    assert all(batch.schema.equals(SCHEMA) for batch in batches)
    assert sum(batch.num_rows for batch in batches) == 30


def test_a_running_job_s_committed_rows_can_be_read(storage: Storage) -> None:
    spec, plan = started(storage, shards=2)
    with pytest.raises(JobConflict, match="has not ended"):
        iter_results(storage, spec.job)
    rows = list(iter_results(storage, spec.job, partial=True))
    indexes = [row.row_index for row in rows]
    expected = {row.row_index for entry in plan["shards"][:2] for row in results(storage, entry)} | {29}
    assert indexes == sorted(expected)
    for entry in plan["shards"][2:]:
        commit(storage, spec, entry)
    finalize(storage, spec, plan)
    assert len(list(iter_results(storage, spec.job, partial=True))) == 30


def test_a_job_without_a_plan_has_no_rows_yet(storage: Storage) -> None:
    spec = store_job(storage, prompts(3))
    assert list(iter_results(storage, spec.job, partial=True)) == []


@pytest.mark.parametrize("partial", [False, True])
def test_an_unknown_job_is_said_to_be_unknown(storage: Storage, partial: bool) -> None:
    with pytest.raises(JobNotFound, match="no job job-nowhere"):
        iter_results(storage, "job-nowhere", partial=partial)


@pytest.mark.parametrize("harm", ["remove", "cut", "flip"])
def test_a_part_that_is_missing_or_damaged_is_named(storage: Storage, harm: str) -> None:
    spec, plan = started(storage)
    key = finalize(storage, spec, plan)["parts"][1]["key"]
    data = storage.get(key)
    if harm == "remove":
        storage.delete([key])
    elif harm == "cut":
        storage.put(key, data[:-1])
    else:
        storage.put(key, data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(StorageError, match=key.rpartition("/")[2]):
        list(iter_results(storage, spec.job))


def test_parts_of_a_newer_pagemill_are_refused(local_storage: Storage) -> None:
    spec, plan = started(local_storage)
    manifest = finalize(local_storage, spec, plan)
    manifest["parts"][0]["schema_version"] = 99
    local_storage.put(layout.manifest(spec.job), encode_json(manifest))
    with pytest.raises(StorageError, match="newer Pagemill"):
        iter_results(local_storage, spec.job)


def test_jsonl_has_what_is_not_null() -> None:
    output = io.BytesIO()
    rows = [
        done(0, "é\n", metadata='{"k":[1]}', logprobs='{"content":[]}', seed=5, total_ms=1.5),
        failed(1),
        done(
            2, "first", choices=[{"index": 0, "text": "first", "logprobs": "[1]"}, {"index": 1, "text": "b"}]
        ),
    ]
    assert to_jsonl(rows, output) == 3
    first, second, third = lines(output)
    assert (first["text"], first["metadata"], first["logprobs"]) == ("é\n", {"k": [1]}, {"content": []})
    assert (first["seed"], first["total_ms"], first["custom_id"], first["line"]) == (5, 1.5, "row-0", 1)
    assert "error_code" not in first
    assert (second["status"], second["error_code"]) == ("failed", "prompt_too_long")
    assert "text" not in second
    assert [choice["text"] for choice in third["choices"]] == ["first", "b"]
    assert third["choices"][0]["logprobs"] == [1]


LOGPROBS = [
    {
        "token": "ra",
        "token_id": 5,
        "logprob": -0.5,
        "top_logprobs": [{"token": "x", "token_id": 6, "logprob": -1}],
    },
    {"token": "w", "token_id": 7, "logprob": -0.25, "top_logprobs": []},
]
TOLD = {
    "tokens": ["ra", "w"],
    "token_logprobs": [-0.5, -0.25],
    "top_logprobs": [{"x": -1}, {}],
    "text_offset": [0, 2],
}


def test_csv_holds_any_text_and_each_seed_exactly() -> None:
    said = 'two\nlines, "quoted"\r\n; é'
    several = [
        {"index": 0, "text": "a,\n", "finish_reason": "stop", "logprobs": "[1]"},
        {"index": 1, "text": "b", "finish_reason": "length"},
    ]
    rows = [
        done(0, said, seed=3560768571718309866, metadata='{"k":"v, w"}', finished_at=1764504000.25),
        failed(1, message="line 2: no JSON"),
        done(2, "a,\n", choices=several, seed=2**63 - 1, total_ms=0.5),
    ]
    output = io.BytesIO()
    assert to_csv([batch_of(rows[:2]), batch_of(rows[2:])], output) == 3
    text = output.getvalue().decode()
    assert text.splitlines()[0].replace('"', "").split(",") == SCHEMA.names
    first, second, third = csv.DictReader(io.StringIO(text, newline=""))
    assert first["text"] == said
    assert (first["seed"], third["seed"]) == ("3560768571718309866", str(2**63 - 1))
    assert (first["metadata"], float(first["finished_at"])) == ('{"k":"v, w"}', 1764504000.25)
    assert (second["custom_id"], second["error_message"]) == ("row-1", "line 2: no JSON")
    assert [second[name] for name in ("text", "choices", "seed", "finished_at")] == [""] * 4
    assert json.loads(third["choices"]) == [several[0] | {"logprobs": [1]}, several[1]]


def test_csv_tells_an_empty_text_from_none() -> None:
    rows = [done(0), failed(1)]
    rows[0].text = ""
    output = io.BytesIO()
    to_csv([batch_of(rows)], output)
    options = ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False)
    table = read_csv(io.BytesIO(output.getvalue()), convert_options=options)
    assert table.column("text").to_pylist() == ["", None]


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\0=1", "＝1", "=", '=HYPERLINK("x")']
TEXTS = ["'=1", "1+1", " =1", "two\n=lines", '"=1"', "a,=1"]


@pytest.mark.parametrize("safe", [False, True])
def test_csv_for_a_spreadsheet_has_an_apostrophe_before_formulas_and_else_what_was_said(safe: bool) -> None:
    rows = [done(index, text, seed=-5) for index, text in enumerate(FORMULAS + TEXTS)]
    rows.append(failed(len(rows), message="-1 is no prompt"))
    rows[0].custom_id, rows[1].custom_id = "=id", "id"
    output = io.BytesIO()
    assert to_csv([batch_of(rows)], output, safe=safe) == len(rows)
    records = list(csv.DictReader(io.StringIO(output.getvalue().decode(), newline="")))
    mark = "'" if safe else ""
    texts = [f"{mark}{text}" for text in FORMULAS] + TEXTS
    assert [record["text"] for record in records] == [*texts, ""]
    assert [records[0][name] for name in ("custom_id", "seed")] == [f"{mark}=id", "-5"]
    assert records[1]["custom_id"] == "id"
    assert records[-1]["error_message"] == f"{mark}-1 is no prompt"


def test_csv_holds_one_batch_at_a_time() -> None:
    output, lines_so_far = io.BytesIO(), list[int]()

    def batches() -> Iterator[pa.RecordBatch]:
        for index in range(3):
            lines_so_far.append(output.getvalue().count(b"\n"))
            yield batch_of([done(index)])

    to_csv(batches(), output)
    assert lines_so_far == [1, 2, 3]


def test_csv_of_a_job_without_rows_is_its_head() -> None:
    output = io.BytesIO()
    assert to_csv([], output) == 0
    assert output.getvalue().count(b"\n") == 1


def test_openai_files_have_openai_s_shapes() -> None:
    output, errors = io.BytesIO(), io.BytesIO()
    rows = [
        done(0, "hello", completion_tokens=4, cached_tokens=2, metadata='{"k":1}'),
        failed(1, "batch_expired"),
        done(2, "raw", kind="completion", finish_reason="length", logprobs=json.dumps(LOGPROBS),
             finished_at=1699999990.75),
        done(3, "a", choices=[{"index": i, "text": "ab"[i], "finish_reason": "stop"} for i in (0, 1)]),
    ]  # fmt: skip
    assert to_openai(rows, output, errors, created=1700000000) == (3, 1)
    chat, completion, several = lines(output)
    assert (chat["custom_id"], chat["error"], chat["response"]["status_code"]) == ("row-0", None, 200)
    assert chat["response"]["request_id"]
    assert chat["response"]["body"] == {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "metadata": {"k": 1},
    }
    body = completion["response"]["body"]
    assert (body["object"], body["created"]) == ("text_completion", 1699999990)
    assert body["choices"] == [{"index": 0, "text": "raw", "logprobs": TOLD, "finish_reason": "length"}]
    contents = [choice["message"]["content"] for choice in several["response"]["body"]["choices"]]
    assert contents == ["a", "b"]
    (error,) = lines(errors)
    assert (error["custom_id"], error["response"]) == ("row-1", None)
    assert error["error"] == {"code": "batch_expired", "message": "line 2: it failed", "line": 2}
