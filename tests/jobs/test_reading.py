"""Results as Python wants them: frames, and files."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stored_job import commit, plan_job, prompts, results, store_job

from pagemill.jobs import layout
from pagemill.jobs.errors import JobNotFound, StorageError, UsageError
from pagemill.jobs.finalize import finalize
from pagemill.jobs.reading import AsyncResults, Results
from pagemill.jobs.storage import Storage, encode_json, read_json

SEED = 3560768571718309866
"""No float64: the nearest one is 22 more."""


def ended(storage: Storage, bad: list[int], finished_at: float | None = None) -> Results:
    """A job of six rows that has ended, whose good rows have the seed; lines that are bad have none."""
    spec = store_job(storage, prompts(6, bad))
    plan = plan_job(storage, spec)
    for entry in plan["shards"]:
        rows = results(storage, entry)
        for row in rows:
            row.seed, row.finished_at = SEED, finished_at
        commit(storage, spec, entry, rows=rows)
    finalize(storage, spec, plan)
    return Results(storage, spec.job)


def test_a_frame_holds_seeds_exactly_beside_a_row_that_has_none(local_storage: Storage) -> None:
    frame = ended(local_storage, bad=[2]).pandas()
    assert [int(seed) for seed in frame["seed"].dropna()] == [SEED] * 5
    assert list(frame["seed"].isna()) == [False, False, True, False, False, False]
    written = io.StringIO()
    frame.to_csv(written, index=False)
    again = pandas.read_csv(io.StringIO(written.getvalue()), dtype=str)
    assert list(again["seed"].dropna()) == [str(SEED)] * 5


def test_a_frame_s_types_do_not_depend_on_what_it_holds(local_storage: Storage) -> None:
    whole, broken, empty = (ended(local_storage, bad).pandas() for bad in ([], [2], list(range(6))))
    assert dict(whole.dtypes) == dict(broken.dtypes)
    table = ended(local_storage, bad=[]).table()
    for field in table.schema:
        if pa.types.is_integer(field.type):
            for frame in (whole, broken, empty):
                assert str(frame.dtypes[field.name]) == "Int64", field.name


def indexes_of_csv(path: Path) -> list[int]:
    with path.open(newline="") as file:
        return [int(record["row_index"]) for record in csv.DictReader(file)]


def indexes_of_parquet(path: Path) -> list[int]:
    return list(pq.read_table(path).column("row_index").to_pylist())


def indexes_of_jsonl(path: Path) -> list[int]:
    return [json.loads(line)["row_index"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "indexes"),
    [("a.csv", indexes_of_csv), ("a.parquet", indexes_of_parquet), ("a.jsonl", indexes_of_jsonl)],
)
def test_a_file_s_name_says_its_format(
    local_storage: Storage, tmp_path: Path, name: str, indexes: Any
) -> None:
    place = tmp_path / name
    place.write_text("what was there before")
    results = ended(local_storage, bad=[2])
    assert results.write(str(place)) == 6
    assert indexes(place) == list(range(6))
    assert indexes(place) == [row.row_index for row in results]


async def test_a_file_is_written_from_a_coroutine_too(local_storage: Storage, tmp_path: Path) -> None:
    results = AsyncResults(ended(local_storage, bad=[0]))
    assert await results.write(tmp_path / "a.csv") == 6
    assert indexes_of_csv(tmp_path / "a.csv") == list(range(6))


def test_a_parquet_file_of_all_rows_holds_what_the_parts_hold(local_storage: Storage, tmp_path: Path) -> None:
    results = ended(local_storage, bad=[2])
    results.write(tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet").equals(results.table())


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.jsonl"])
def test_a_file_that_could_not_be_finished_is_not_there(
    local_storage: Storage, tmp_path: Path, name: str
) -> None:
    place = tmp_path / "out" / name
    place.parent.mkdir()
    with pytest.raises(JobNotFound):
        Results(local_storage, "job-nowhere").write(place)
    results = ended(local_storage, bad=[])
    manifest = read_json(local_storage, layout.manifest(results.job))
    assert manifest is not None
    local_storage.delete([manifest["parts"][-1]["key"]])
    with pytest.raises(StorageError, match="missing"):
        results.write(place)
    assert list(place.parent.iterdir()) == []


def test_a_file_s_name_without_a_format_is_refused(local_storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.csv, \.parquet or \.jsonl"):
        ended(local_storage, bad=[]).write(tmp_path / "answers.xlsx")
    assert not (tmp_path / "answers.xlsx").exists()


def created(results: Results) -> set[int]:
    output = io.BytesIO()
    results.write_openai(output, io.BytesIO())
    return {json.loads(line)["response"]["body"]["created"] for line in output.getvalue().splitlines()}


def test_an_answer_was_created_when_its_row_had_finished(local_storage: Storage) -> None:
    assert created(ended(local_storage, bad=[2], finished_at=1764504000.75)) == {1764504000}


def test_an_answer_that_does_not_know_when_was_created_when_its_job_ended(local_storage: Storage) -> None:
    results = ended(local_storage, bad=[2])
    key = layout.manifest(results.job)
    manifest = read_json(local_storage, key)
    assert manifest is not None
    local_storage.put(key, encode_json(manifest | {"finished_at": 1764504007.5}))
    assert created(results) == {1764504007}


def test_an_answer_of_a_running_job_that_does_not_know_when_was_created_with_the_job(
    local_storage: Storage,
) -> None:
    spec = store_job(local_storage, prompts(3))
    for entry in plan_job(local_storage, spec)["shards"]:
        commit(local_storage, spec, entry)
    assert created(Results(local_storage, spec.job, partial=True)) == {int(spec.created_at)}
