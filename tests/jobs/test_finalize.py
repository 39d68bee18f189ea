from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from stored_job import BAD, commit, plan_job, prompts, results, store_job

from pagemill.jobs import layout
from pagemill.jobs.commit import PartDamaged, check_part, write_segment
from pagemill.jobs.errors import PreconditionFailed, StorageError
from pagemill.jobs.finalize import finalize, sweep
from pagemill.jobs.results import iter_results
from pagemill.jobs.spec import JobSpec
from pagemill.jobs.storage import Storage, read_json


def keys(storage: Storage, prefix: str) -> set[str]:
    return {info.key for info in storage.list(prefix)}


def done_job(
    storage: Storage, count: int = 10, bad: tuple[int, ...] = (3,)
) -> tuple[JobSpec, dict[str, Any]]:
    """A job of which every shard is committed, one of them from a sealed segment."""
    spec = store_job(storage, prompts(count, bad))
    plan = plan_job(storage, spec)
    for entry in plan["shards"]:
        rows = results(storage, entry)
        segment = write_segment(storage, spec.job, entry["shard"], "0-9", 1, rows[:2])
        commit(storage, spec, entry, segments=[segment], rows=rows[2:])
    return spec, plan


def test_the_manifest_adds_up(storage: Storage) -> None:
    spec, plan = done_job(storage)
    manifest = finalize(storage, spec, plan)
    assert manifest == read_json(storage, layout.manifest(spec.job))
    assert storage.get(layout.success(spec.job)) == b""
    assert (manifest["state"], manifest["error_code"], manifest["error_message"]) == ("completed", "", "")
    assert (manifest["total"], manifest["completed"], manifest["failed"]) == (10, 9, 1)
    assert (manifest["prompt_tokens"], manifest["completion_tokens"], manifest["cached_tokens"]) == (
        27,
        18,
        9,
    )
    assert manifest["errors"] == {"invalid_json_line": 1}
    assert (manifest["model"], manifest["fingerprint"], manifest["created_at"]) == ("tiny", "print", 1.5)
    assert manifest["finished_at"] > 1.7e9
    assert sum(part["rows"] for part in manifest["parts"]) == 10
    assert [row.row_index for row in iter_results(storage, spec.job)] == list(range(10))
    for part in manifest["parts"]:
        head = storage.head(part["key"])
        assert head is not None
        assert head.size == part["bytes"]


def test_only_what_counts_is_left(storage: Storage) -> None:
    spec, plan = done_job(storage)
    orphans = [
        layout.part(spec.job, 0, "0-77", "0123456789abcdef"),
        layout.shard(spec.job, "0-4", 0),
        layout.segment(spec.job, 1, "0-77", 1, "0123456789abcdef"),
    ]
    for key in orphans:
        storage.put(key, b"somebody else's")
    sweep(storage, spec.job)
    assert keys(storage, layout.root(spec.job)).issuperset(orphans), "no manifest: nothing is judged"

    manifest = finalize(storage, spec, plan)
    assert keys(storage, layout.work(spec.job)) == set()
    assert keys(storage, layout.parts(spec.job)) == {part["key"] for part in manifest["parts"]}
    assert keys(storage, layout.shards(spec.job)) == {entry["key"] for entry in plan["shards"]}
    assert len(keys(storage, layout.commits(spec.job))) == len(plan["shards"])
    assert storage.head(spec.input.key) is not None


def test_finalizing_again_changes_nothing(storage: Storage) -> None:
    spec, plan = done_job(storage)
    first = finalize(storage, spec, plan)
    storage.delete([layout.success(spec.job)])  # as if the first one had been killed there
    storage.put(layout.part(spec.job, 0, "0-77", "0123456789abcdef"), b"late orphan")
    assert finalize(storage, spec, plan, stop={"reason": "cancelled"}) == first
    assert storage.head(layout.success(spec.job)) is not None
    assert keys(storage, layout.parts(spec.job)) == {part["key"] for part in first["parts"]}


def test_of_several_who_finalize_at_once_all_get_one_manifest(storage: Storage) -> None:
    spec, plan = done_job(storage)
    barrier = threading.Barrier(3)

    def work(_: int) -> dict[str, Any]:
        barrier.wait()
        return finalize(storage, spec, plan)

    with ThreadPoolExecutor(3) as pool:
        manifests = list(pool.map(work, range(3)))
    assert manifests[0] == manifests[1] == manifests[2] == read_json(storage, layout.manifest(spec.job))


def test_a_job_whose_shards_are_not_all_committed_cannot_be_finalized(local_storage: Storage) -> None:
    spec = store_job(local_storage, prompts(10))
    plan = plan_job(local_storage, spec)
    commit(local_storage, spec, plan["shards"][0])
    missing = len(plan["shards"]) - 1
    with pytest.raises(StorageError, match=f"{missing} of its {missing + 1} shards are not committed"):
        finalize(local_storage, spec, plan)
    assert read_json(local_storage, layout.manifest(spec.job)) is None


def harm(storage: Storage, key: str, how: str) -> None:
    data = storage.get(key)
    if how == "remove":
        storage.delete([key])
    else:
        storage.put(key, bytes([data[0] ^ 1]) + data[1:])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagemill.jobs.finalize.LOOK_AGAIN_S", (0.0, 0.0))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["change", "remove"])
def test_a_part_that_is_not_as_committed_is_replaced_by_what_is_sealed_and_error_rows(
    storage: Storage, how: str
) -> None:
    spec, plan = done_job(storage)
    key = next(iter(storage.list(layout.parts(spec.job)))).key
    harm(storage, key, how)
    manifest = finalize(storage, spec, plan)
    assert manifest["state"] == "completed"
    assert manifest["damaged"] == [key]
    assert key not in {part["key"] for part in manifest["parts"]}
    assert (storage.head(key) is not None) == (how == "change"), "a damaged part is put aside, not swept"
    rows = list(iter_results(storage, spec.job))
    assert [row.row_index for row in rows] == list(range(10))
    lost = [row for row in rows if row.error_code == "result_lost"]
    size = plan["shards"][0]["rows"]
    assert len(lost) == size - 2, "two rows of each shard were sealed before it was committed"
    assert (manifest["completed"], manifest["failed"]) == (9 - len(lost), 1 + len(lost))
    assert manifest["errors"] == {"invalid_json_line": 1, "result_lost": len(lost)}
    assert all("retry-failed" in (row.error_message or "") for row in lost)
    assert finalize(storage, spec, plan) == manifest


def test_a_part_that_comes_back_wrong_once_is_not_damaged(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill.jobs.finalize.LOOK_AGAIN_S", (0.0,))
    spec, plan = done_job(storage)
    seen = set[str]()

    def flaky(storage: Storage, part: dict[str, Any]) -> None:
        if part["key"] not in seen:
            seen.add(part["key"])
            raise PartDamaged("garbled on the way")
        check_part(storage, part)

    monkeypatch.setattr("pagemill.jobs.finalize.check_part", flaky)
    manifest = finalize(storage, spec, plan)
    assert (manifest["completed"], manifest["damaged"]) == (9, [])
    assert len(seen) == len(manifest["parts"])


@pytest.mark.usefixtures("impatient")
def test_a_damaged_part_of_bad_lines_stops_the_job_from_ending_until_it_is_back(storage: Storage) -> None:
    spec, plan = done_job(storage)
    key = plan["error_parts"][0]["key"]
    data = storage.get(key)
    harm(storage, key, "change")
    with pytest.raises(StorageError, match="put a copy of it back, or delete the job"):
        finalize(storage, spec, plan)
    assert read_json(storage, layout.manifest(spec.job)) is None
    assert keys(storage, layout.work(spec.job)), "nothing was swept"
    storage.put(key, data)
    assert finalize(storage, spec, plan)["state"] == "completed"


def test_parts_that_do_not_add_up_to_the_plan_stop_the_job_from_ending(local_storage: Storage) -> None:
    spec, plan = done_job(local_storage)
    with pytest.raises(StorageError, match="its plan has 11 rows and its parts have 10"):
        finalize(local_storage, spec, plan | {"total": 11})


@pytest.mark.parametrize(
    ("reason", "code"),
    [("cancelled", "batch_cancelled"), ("expired", "batch_expired"), ("failed", "job_failed")],
)
def test_a_stopped_job_keeps_what_is_done_and_the_rest_are_error_rows(
    storage: Storage, reason: str, code: str
) -> None:
    """Of three shards one is committed, one sealed in part, one never begun."""
    spec = store_job(storage, prompts(13, bad=(0,)))
    plan = plan_job(storage, spec)
    committed, sealed, _ = plan["shards"]
    commit(storage, spec, committed)
    write_segment(storage, spec.job, sealed["shard"], "0-9", 1, results(storage, sealed)[:3])
    stop = {"reason": reason, "error_code": "storage_error", "error_message": "It broke."}
    manifest = finalize(storage, spec, plan, stop=stop)
    assert manifest["state"] == reason
    assert (manifest["error_code"], manifest["error_message"]) == ("storage_error", "It broke.")
    assert (manifest["total"], manifest["completed"], manifest["failed"]) == (13, 7, 6)
    assert manifest["errors"] == {code: 5, "invalid_json_line": 1}
    rows = list(iter_results(storage, spec.job))
    assert [row.row_index for row in rows] == list(range(13))
    assert [row.custom_id for row in rows] == [f"row-{i}" for i in range(13)]
    assert {row.seed is None for row in rows if row.error_code == code} == {False}
    assert keys(storage, layout.work(spec.job)) == set()


def test_a_job_stopped_before_its_plan_ends_with_an_empty_manifest(storage: Storage) -> None:
    spec = store_job(storage, prompts(5))
    plan = plan_job(storage, spec, stopped="cancelled")
    manifest = finalize(storage, spec, plan, stop={"reason": "cancelled", "at": 1.0})
    assert (manifest["state"], manifest["total"], manifest["parts"]) == ("cancelled", 0, [])
    assert storage.head(layout.success(spec.job)) is not None
    assert list(iter_results(storage, spec.job)) == []


def test_a_file_that_was_refused_ends_its_job_as_failed(storage: Storage) -> None:
    spec = store_job(storage, [])
    manifest = finalize(storage, spec, plan_job(storage, spec))
    assert (manifest["state"], manifest["error_code"], manifest["total"]) == ("failed", "empty_file", 0)
    assert manifest["error_message"]


def test_a_job_of_bad_lines_alone_completes(storage: Storage) -> None:
    spec = store_job(storage, [BAD] * 3)
    manifest = finalize(storage, spec, plan_job(storage, spec))
    assert (manifest["state"], manifest["completed"], manifest["failed"]) == ("completed", 0, 3)
    assert [row.line for row in iter_results(storage, spec.job)] == [1, 2, 3]


def test_a_store_that_lets_nothing_be_deleted_does_not_keep_a_job_from_ending(
    local_storage: Storage,
) -> None:
    spec, plan = done_job(local_storage)

    class Strict:
        def delete(self, keys: Any) -> None:
            list(keys)
            raise StorageError("Deleting is not allowed.")

        def __getattr__(self, name: str) -> Any:
            return getattr(local_storage, name)

    strict: Any = Strict()
    assert finalize(strict, spec, plan)["state"] == "completed"
    with pytest.raises(PreconditionFailed):
        local_storage.put(layout.success(spec.job), b"", if_absent=True)
