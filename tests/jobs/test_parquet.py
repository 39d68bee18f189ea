from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from result_rows import any_rows, done, failed, rows_of

from pagemill.jobs import parquet
from pagemill.jobs.errors import DiskFull, RowFault, StorageError
from pagemill.jobs.parquet import (
    SCHEMA,
    ResultRow,
    batch_of,
    batches_of,
    read_batches,
    read_rows,
    stats_of,
    stream_batches,
    write_batches,
    write_rows,
)
from pagemill.jobs.row import Row

shared_folder = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)


@given(rows=any_rows(max_size=12))
@shared_folder
def test_any_rows_come_back_as_they_were(tmp_path: Path, rows: list[ResultRow]) -> None:
    path = tmp_path / "part.parquet"
    stats = write_rows(path, rows)
    assert list(read_rows(path)) == rows
    assert list(read_rows(path.read_bytes())) == rows
    assert stats_of(path) == stats
    assert stats.rows == len(rows) == stats.completed + stats.failed
    assert stats.failed == sum(row.status == "failed" for row in rows) == sum(stats.errors.values())
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        assert getattr(stats, name) == sum(getattr(row, name) for row in rows)
    ends = (rows[0].row_index, rows[-1].row_index) if rows else (-1, -1)
    assert (stats.min_row_index, stats.max_row_index) == ends
    assert stats.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert stats.bytes == path.stat().st_size


def test_a_column_of_nulls_keeps_its_type_and_all_parts_are_one_dataset(tmp_path: Path) -> None:
    """1,000 rows whose error_message is null, then one that is not."""
    write_rows(tmp_path / "a.parquet", rows_of(range(1000)))
    write_rows(tmp_path / "b.parquet", [failed(1000)])
    write_rows(tmp_path / "c.parquet", [])
    schemas = [pq.read_schema(path) for path in sorted(tmp_path.iterdir())]
    assert all(schema.equals(SCHEMA) for schema in schemas)
    table = ds.dataset(tmp_path).to_table()
    assert table.num_rows == 1001
    assert table.column("error_message").null_count == 1000
    assert not any(field.type == pa.null() for field in table.schema)


def test_row_groups_end_by_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "x", rows_of(range(20_000)))
    metadata = pq.read_metadata(tmp_path / "x")
    assert [metadata.row_group(i).num_rows for i in range(3)] == [8192, 8192, 20_000 - 2 * 8192]
    assert metadata.row_group(0).column(5).compression == "ZSTD"


def test_row_groups_end_by_bytes(tmp_path: Path) -> None:
    large = 3 << 20
    write_rows(tmp_path / "x", (done(i, chr(65 + i % 26) * large) for i in range(20)))
    metadata = pq.read_metadata(tmp_path / "x")
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    assert max(group.num_rows for group in groups) <= parquet.BYTES_PER_GROUP // large + 1
    assert len(groups) >= 3
    assert [len(row.text or "") for row in read_rows(tmp_path / "x")] == [large] * 20


def test_large_outputs_pass_the_limit_of_one_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few outputs that are too much for one group together, and one that is too much alone."""
    monkeypatch.setattr(parquet, "BYTES_PER_GROUP", 10_000)
    monkeypatch.setattr(parquet, "BATCH_BYTES", 1000)
    rows = [done(i, "x" * size) for i, size in enumerate((6000, 6000, 50_000, 10, 10))]
    write_rows(tmp_path / "x", rows)
    assert list(read_rows(tmp_path / "x")) == rows
    assert pq.read_metadata(tmp_path / "x").num_row_groups >= 3
    assert all(field.type != pa.string() for field in pq.read_schema(tmp_path / "x"))


def test_one_batch_larger_than_a_group_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "BYTES_PER_GROUP", 10_000)
    rows = [done(i, "x" * 1000) for i in range(100)]
    write_batches(tmp_path / "x", [batch_of(rows)])
    metadata = pq.read_metadata(tmp_path / "x")
    assert metadata.num_row_groups >= 10
    assert list(read_rows(tmp_path / "x")) == rows


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        before, most = pa.total_allocated_bytes(), 0

        def rows() -> Iterator[ResultRow]:
            nonlocal most
            for i in range(count):
                if i % 1000 == 0:
                    most = max(most, pa.total_allocated_bytes() - before)
                yield done(i, f"{i} " * 200)

        write_rows(tmp_path / "x", rows())
        return most

    assert peak(50_000) < 1.5 * peak(20_000) + (1 << 20)


def test_an_open_file_takes_the_rows_in_bounded_groups_and_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ROWS_PER_GROUP", 1500)
    rows = rows_of(range(4000))
    with (tmp_path / "x").open("wb") as file:
        assert stream_batches(file, batches_of(rows)) == 4000
        assert not file.closed
    assert list(read_rows(tmp_path / "x")) == rows
    metadata = pq.read_metadata(tmp_path / "x")
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [1500, 1500, 1000]


def test_batches_of_long_rows_are_short(tmp_path: Path) -> None:
    write_rows(tmp_path / "x", (done(i, f"{i:07d}" * 30_000) for i in range(60)))
    assert max(batch.num_rows for batch in read_batches(tmp_path / "x")) <= 8


@pytest.mark.parametrize("indexes", [[1, 1], [2, 1], [0, 5, 4]])
def test_rows_out_of_order_are_refused(tmp_path: Path, indexes: list[int]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        write_rows(tmp_path / "x", rows_of(indexes))
    with pytest.raises(ValueError, match="ascend"):
        write_batches(tmp_path / "x", [batch_of(rows_of([i])) for i in indexes])
    assert list(tmp_path.iterdir()) == []


def test_an_error_among_the_rows_leaves_no_file(tmp_path: Path) -> None:
    def rows() -> Iterator[ResultRow]:
        yield from rows_of(range(10_000))
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="the engine died"):
        write_rows(tmp_path / "x", rows())
    assert list(tmp_path.iterdir()) == []


KILLED_WRITER = """
import sys
from pathlib import Path
from pagemill.jobs.parquet import ResultRow, write_rows
def rows():
    for i in range(10_000):
        yield ResultRow(i, f"row-{i}", i, "completed", text="x" * 200)
    print("half", flush=True)
    sys.stdin.read()
write_rows(Path(sys.argv[1]), rows())
"""


def test_a_writer_killed_in_the_middle_leaves_no_file_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        writer.kill()
    assert not path.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["part.parquet.writing"]
    with pytest.raises(StorageError, match="damaged"):
        list(read_rows(tmp_path / "part.parquet.writing"))
    write_rows(path, rows_of(range(3)))
    assert len(list(read_rows(path))) == 3


def test_a_full_disk_is_said_in_a_sentence(tmp_path: Path) -> None:
    def rows() -> Iterator[ResultRow]:
        yield from rows_of(range(10))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DiskFull, match="TMPDIR"):
        write_rows(tmp_path / "x", rows())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="there is no /dev/full here")
def test_arrow_s_own_word_for_a_full_disk_is_understood(tmp_path: Path) -> None:
    (tmp_path / "x.writing").symlink_to("/dev/full")
    with pytest.raises(DiskFull, match="TMPDIR") as caught:
        write_rows(tmp_path / "x", (done(i, os.urandom(500).hex()) for i in range(50)))
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "junk"])
def test_a_damaged_file_is_said_to_be_damaged(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "part.parquet"
    write_rows(path, (done(i, f"{i * 7919} " * 20) for i in range(2000)))
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 3] ^= 0x40
    path.write_bytes({"cut": data[:-100], "empty": b"", "junk": b"PAR1" * 9}.get(damage, data))
    with pytest.raises(StorageError, match=r"part\.parquet is damaged"):
        list(read_rows(path))


def test_a_parquet_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"row_index": [1]}), tmp_path / "x")
    with pytest.raises(StorageError, match="other columns"):
        list(read_rows(tmp_path / "x"))


def test_a_file_of_the_first_version_is_read_with_nulls_for_what_it_lacks(tmp_path: Path) -> None:
    first = pa.schema(list(SCHEMA)[:-1], {"pagemill.schema_version": "1"})
    assert first.names[-1] == "metadata"
    batch = batch_of([done(0, total_ms=5.0), failed(1)]).select(first.names)
    pq.write_table(pa.Table.from_batches([batch.cast(first)]), tmp_path / "old.parquet")
    assert list(read_rows(tmp_path / "old.parquet")) == [done(0, total_ms=5.0), failed(1)]
    (some,) = read_batches(tmp_path / "old.parquet", columns=["row_index", "finished_at"])
    assert some.to_pylist() == [{"row_index": 0, "finished_at": None}, {"row_index": 1, "finished_at": None}]
    new = tmp_path / "new.parquet"
    write_batches(new, read_batches(tmp_path / "old.parquet"))  # as a merge of old segments does
    assert pq.read_schema(new).equals(SCHEMA)


def test_half_a_character_does_not_cost_other_rows_their_results(tmp_path: Path) -> None:
    rows = [
        done(0, "fine", choices=[{"index": 0, "text": "\ud83d\ude00 \ud800", "finish_reason": "stop"}]),
        done(1, "broken \udc00"),
        done(2, "fine too"),
    ]
    write_rows(tmp_path / "x", rows)
    found = list(read_rows(tmp_path / "x"))
    assert [row.text for row in found] == ["fine", "broken \ufffd", "fine too"]
    assert found[0].choices is not None
    assert found[0].choices[0]["text"] == "\U0001f600 \ufffd"


def test_a_row_is_either_completed_or_failed() -> None:
    ok = {"row_index": 0, "custom_id": "a", "line": 1}
    for wrong in (
        {"status": "completed"},
        {"status": "completed", "text": "", "error_code": "x"},
        {"status": "failed", "error_code": "x"},
        {"status": "failed", "error_code": "x", "error_message": "y", "text": ""},
    ):
        with pytest.raises(ValueError, match="does not look like it"):
            ResultRow(**ok, **wrong)  # type: ignore[arg-type]
    ResultRow(**ok, status="completed", text="")  # type: ignore[arg-type]


def test_error_rows_say_what_and_where() -> None:
    row = Row(7, 9, "my-id", "chat", [], None, None, {}, seed=5, requested_model="gpt", metadata={"a": 1})
    found = ResultRow.error_row(row, "batch_cancelled", "It was cancelled.", attempt=2, model="m")
    assert (found.row_index, found.line, found.custom_id, found.seed) == (7, 9, "my-id", 5)
    assert (found.requested_model, found.metadata, found.attempt) == ("gpt", '{"a":1}', 2)
    fault = ResultRow.fault_row(3, 4, "row-3", RowFault("invalid_json_line", "line 4: no JSON", 4))
    assert (fault.status, fault.error_code, fault.line, fault.kind) == (
        "failed",
        "invalid_json_line",
        4,
        None,
    )
