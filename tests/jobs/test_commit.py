from __future__ import annotations

import signal
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from result_rows import done, failed, rows_of

from pagemill.jobs import layout
from pagemill.jobs.commit import (
    RowsDoNotMatch,
    check_part,
    commit_shard,
    list_commits,
    list_segments,
    read_commit,
    read_sealed,
    write_segment,
)
from pagemill.jobs.errors import StorageError
from pagemill.jobs.parquet import ResultRow, read_rows
from pagemill.jobs.storage import ObjectInfo, Storage, open_storage


@pytest.fixture
def job() -> str:
    return f"job-{uuid.uuid4().hex[:12]}"


ENTRY = {"shard": 3}


def commit(
    storage: Storage,
    job: str,
    expected: set[int],
    *,
    fence: str = "0-9",
    segments: Any = (),
    rows: Any = (),
) -> dict[str, Any]:
    return commit_shard(
        storage, job, ENTRY, fence=fence, segments=segments, rows=rows, expected_row_indexes=expected
    )


def part_rows(storage: Storage, record: dict[str, Any]) -> list[ResultRow]:
    return list(read_rows(storage.get(record["part"]["key"])))


def keys(storage: Storage) -> set[str]:
    return {info.key for info in storage.list("")}


@dataclass
class Interposed:
    """A store whose uploads go wrong on order: `spoil(key, path)` may change the file, or raise."""

    inner: Storage
    spoil: Any

    def put_file(self, key: str, path: Path, *, if_absent: bool = False) -> ObjectInfo:
        return self.inner.put_file(key, self.spoil(key, path), if_absent=if_absent)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_segment_says_what_it_holds(storage: Storage, job: str) -> None:
    segment = write_segment(storage, job, 3, "0-9", 1, [failed(7), done(2), done(5)])
    assert (segment["shard"], segment["fence"], segment["seq"]) == (3, "0-9", 1)
    assert (segment["rows"], segment["completed"], segment["failed"]) == (3, 2, 1)
    assert (segment["min_row_index"], segment["max_row_index"]) == (2, 7)
    assert segment["errors"] == {"prompt_too_long": 1}
    assert [row.row_index for row in read_rows(storage.get(segment["key"]))] == [2, 5, 7]


def test_sealing_the_same_again_makes_the_same_object(storage: Storage, job: str) -> None:
    first = write_segment(storage, job, 3, "0-9", 1, rows_of([1, 2]))
    assert write_segment(storage, job, 3, "0-9", 1, rows_of([2, 1])) == first
    assert len(keys(storage)) == 1


def test_the_store_knows_its_segments_when_redis_does_not(storage: Storage, job: str) -> None:
    sealed = [
        write_segment(storage, job, 3, "0-9", 1, rows_of([1, 2])),
        write_segment(storage, job, 3, "1-2", 12, [done(4), failed(9)]),
    ]
    other = write_segment(storage, job, 4, "0-9", 1, rows_of([5]))
    by_key = {segment["key"]: segment for segment in list_segments(storage, job, 3)}
    assert by_key == {segment["key"]: segment for segment in sealed}
    assert {s["key"] for s in list_segments(storage, job)} == {*by_key, other["key"]}
    assert list_segments(storage, job, 5) == []


def test_a_shard_is_committed_from_segments_and_unsealed_rows(storage: Storage, job: str) -> None:
    segments = [
        write_segment(storage, job, 3, "0-9", 1, rows_of([5, 1])),
        write_segment(storage, job, 3, "0-9", 2, [failed(3)]),
    ]
    record = commit(storage, job, {1, 2, 3, 5}, segments=segments, rows=rows_of([2]))
    assert read_commit(storage, job, 3) == record
    assert list_commits(storage, job) == {3: record}
    assert [row.row_index for row in part_rows(storage, record)] == [1, 2, 3, 5]
    part = record["part"]
    assert (part["rows"], part["completed"], part["failed"], part["shard"]) == (4, 3, 1, 3)
    assert part["errors"] == {"prompt_too_long": 1}
    assert (part["min_row_index"], part["max_row_index"], part["prompt_tokens"]) == (1, 5, 9)
    check_part(storage, part)
    assert all(segment["key"] in keys(storage) for segment in segments), "only finalize deletes"


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, list[int]]]:
    """Segments of several holders of one shard, overlapping as takeovers make them."""
    fences = st.sampled_from(["0-9", "0-10", "0-1795983498001", "1-2"])
    identities = draw(st.sets(st.tuples(fences, st.integers(1, 12)), max_size=5))
    return [(f, n, sorted(draw(st.sets(st.integers(0, 15), min_size=1)))) for f, n in sorted(identities)]


@given(history=histories(), fence=st.sampled_from(["0-9", "0-10", "1-1", "2-1"]), data=st.data())
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_row_comes_once_from_the_highest_fence_and_then_the_latest_seal(
    tmp_path: Path, history: list[tuple[str, int, list[int]]], fence: str, data: st.DataObject
) -> None:
    storage, job = open_storage(tmp_path), f"job-{uuid.uuid4().hex}"
    winner: dict[int, tuple[tuple[int, ...], float, str]] = {}
    segments = []
    for its_fence, seq, indexes in history:
        note = f"by {its_fence} in {seq}"
        segments.append(write_segment(storage, job, 3, its_fence, seq, rows_of(indexes, note)))
        for i in indexes:
            claim = (layout.fence_order(its_fence), seq, f"text {i} {note}")
            winner[i] = max(winner.get(i, claim), claim)
    unsealed = sorted(set(range(16)) - winner.keys() | data.draw(st.sets(st.integers(0, 15))))
    for i in unsealed:
        claim = (layout.fence_order(fence), float("inf"), f"text {i} unsealed")
        winner[i] = max(winner.get(i, claim), claim)
    record = commit(
        storage,
        job,
        set(range(16)),
        fence=fence,
        segments=data.draw(st.permutations(segments)),
        rows=rows_of(unsealed, "unsealed"),
    )
    assert [(row.row_index, row.text) for row in part_rows(storage, record)] == [
        (i, winner[i][2]) for i in range(16)
    ]


def test_rows_that_are_not_exactly_the_shard_s_are_not_committed(storage: Storage, job: str) -> None:
    segment = write_segment(storage, job, 3, "0-9", 1, rows_of([1, 2]))
    with pytest.raises(RowsDoNotMatch, match=r"1 of its rows are missing \(4\)") as missing:
        commit(storage, job, {1, 2, 3, 4}, segments=[segment], rows=rows_of([3]))
    assert (missing.value.missing, missing.value.unexpected) == ({4}, set())
    with pytest.raises(RowsDoNotMatch, match=r"1 rows are not its own \(9\)") as unexpected:
        commit(storage, job, {1, 2}, segments=[segment], rows=rows_of([9]))
    assert (unexpected.value.missing, unexpected.value.unexpected) == (set(), {9})
    assert read_commit(storage, job, 3) is None
    with pytest.raises(ValueError, match="each once"):
        commit(storage, job, {1}, rows=rows_of([1, 1]))


def test_whoever_comes_second_adopts_the_record_of_the_first(storage: Storage, job: str) -> None:
    first = commit(storage, job, {1}, fence="0-9", rows=rows_of([1], "first"))
    second = commit(storage, job, {1}, fence="0-10", rows=rows_of([1], "second"))
    assert second == first
    assert part_rows(storage, second)[0].text == "text 1 first"


def test_of_two_workers_that_commit_at_once_one_part_counts(storage: Storage, job: str) -> None:
    barrier = threading.Barrier(2)

    def work(fence: str) -> dict[str, Any]:
        def wait(key: str, path: Path) -> Path:
            barrier.wait(timeout=20)  # both have seen that there is no record yet
            return path

        interposed: Any = Interposed(storage, wait)
        return commit(interposed, job, {1, 2}, fence=fence, rows=rows_of([1, 2], fence))

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(work, ["0-9", "0-10"])
    assert one == other == read_commit(storage, job, 3)
    parts = [key for key in keys(storage) if key.startswith(layout.parts(job))]
    assert len(parts) == 2, "the orphan is for finalize to judge"
    check_part(storage, one["part"])


def test_a_part_that_arrives_damaged_is_sent_again(storage: Storage, job: str, tmp_path: Path) -> None:
    sent: list[str] = []

    def spoil(key: str, path: Path) -> Path:
        sent.append(key)
        if len(sent) > 1:
            return path
        spoiled = tmp_path / "spoiled"
        spoiled.write_bytes(path.read_bytes()[:-1] + b"X")
        return spoiled

    interposed: Any = Interposed(storage, spoil)
    record = commit(interposed, job, {1}, rows=rows_of([1]))
    check_part(storage, record["part"])
    assert len(sent) == 2


def test_a_store_that_keeps_damaging_parts_gets_no_commit(storage: Storage, job: str, tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled"
    spoiled.write_bytes(b"something else")
    interposed: Any = Interposed(storage, lambda key, path: spoiled)
    with pytest.raises(StorageError, match="damaged"):
        commit(interposed, job, {1}, rows=rows_of([1]))
    assert read_commit(storage, job, 3) is None


def test_rows_of_a_lost_or_damaged_segment_count_as_not_sealed(storage: Storage, job: str) -> None:
    good, gone, bad = (
        write_segment(storage, job, 3, "0-9", n, rows_of([2 * n, 2 * n + 1])) for n in range(3)
    )
    storage.delete([gone["key"]])
    storage.put(bad["key"], storage.get(bad["key"])[:-1] + b"X")
    sealed = read_sealed(storage, [good, gone, bad])
    assert sealed.segments == [good]
    assert sealed.row_indexes == {0, 1}
    assert sealed.lost == [gone, bad]
    assert [s["key"] for s in list_segments(storage, job, 3)] == [good["key"]]
    with pytest.raises(RowsDoNotMatch) as caught:
        commit(storage, job, set(range(6)), segments=[good, gone, bad])
    assert caught.value.missing == {2, 3, 4, 5}
    record = commit(storage, job, set(range(6)), segments=[good, gone, bad], rows=rows_of([2, 3, 4, 5]))
    assert record["part"]["rows"] == 6


def test_a_worker_whose_segments_were_swept_finds_the_record(storage: Storage, job: str) -> None:
    """It slept while another committed, the job ended, and the sweep took what it had sealed."""
    segment = write_segment(storage, job, 3, "0-9", 1, rows_of([1]))
    theirs: list[dict[str, Any]] = []

    class Late(Interposed):
        def as_file(self, key: str) -> Any:
            theirs.append(commit(storage, job, {1}, fence="0-10", rows=rows_of([1])))
            storage.delete([segment["key"]])
            return self.inner.as_file(key)

    late: Any = Late(storage, None)
    assert commit(late, job, {1}, segments=[segment]) == theirs[0]


def test_a_part_that_was_changed_or_removed_is_found_out(storage: Storage, job: str) -> None:
    part = commit(storage, job, {1}, rows=rows_of([1]))["part"]
    data = storage.get(part["key"])
    for wrong in (data[:-1], data[:-1] + b"X", data + b"X"):
        storage.put(part["key"], wrong)
        with pytest.raises(StorageError, match="damaged"):
            check_part(storage, part)
    storage.delete([part["key"]])
    with pytest.raises(StorageError, match="missing"):
        check_part(storage, part)


KILLED_COMMITTER = """
import os, signal, sys
from pagemill.jobs.commit import commit_shard
from pagemill.jobs.result import ResultRow
from pagemill.jobs.storage_local import LocalStorage
from pathlib import Path

root, job, stage = sys.argv[1:]
def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Doomed(LocalStorage):
    def put_file(self, key, path, **more):
        if stage == "before the part":
            die()
        info = super().put_file(key, path, **more)
        if stage == "after the part":
            die()
        return info
    def put(self, key, data, **more):
        info = super().put(key, data, **more)
        die()

rows = [ResultRow(i, f"row-{i}", i, "completed", text="by the dead") for i in range(3)]
commit_shard(Doomed(Path(root)), job, {"shard": 3}, fence="0-9", segments=[], rows=rows,
             expected_row_indexes={0, 1, 2})
"""


@pytest.mark.parametrize("stage", ["before the part", "after the part", "after the record"])
def test_a_worker_killed_while_committing_leaves_a_whole_commit_or_none(
    tmp_path: Path, job: str, stage: str
) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED_COMMITTER, str(tmp_path), job, stage], check=False)
    assert killed.returncode == -signal.SIGKILL
    storage = open_storage(tmp_path)
    assert (read_commit(storage, job, 3) is not None) == (stage == "after the record")
    record = commit(storage, job, {0, 1, 2}, fence="0-10", rows=rows_of([0, 1, 2]))
    check_part(storage, record["part"])
    assert (part_rows(storage, record)[0].text == "by the dead") == (stage == "after the record")


def test_a_shard_without_rows_can_be_committed(local_storage: Storage, job: str) -> None:
    record = commit(local_storage, job, set())
    assert record["part"]["rows"] == 0
    assert part_rows(local_storage, record) == []
