import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill.jobs import sorting
from pagemill.jobs.errors import StorageError
from pagemill.jobs.sorting import Sorter


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=30)), st.integers(1, 500), st.integers(2, 4))
def test_records_come_out_in_order_however_little_memory_there_is(
    tmp_path: Path, records: list[bytes], memory: int, fan_in: int
) -> None:
    sorter = Sorter(tmp_path, "x", memory=memory, fan_in=fan_in)
    for record in records:
        sorter.add(record)
    assert sorter.count == len(records)
    assert list(sorter.sorted()) == sorted(records)
    assert list(tmp_path.iterdir()) == []


def test_many_runs_of_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "BLOCK", 500)
    chance = random.Random(1)
    records = [chance.randbytes(chance.randrange(40)) for _ in range(20_000)]
    sorter = Sorter(tmp_path, "x", memory=50_000, fan_in=5)
    for record in records:
        sorter.add(record)
    assert list(sorter.sorted()) == sorted(records)


def test_equal_records_all_come_out(tmp_path: Path) -> None:
    sorter = Sorter(tmp_path, "x", memory=100)
    for _ in range(50):
        sorter.add(b"same")
    assert list(sorter.sorted()) == [b"same"] * 50


def test_a_record_larger_than_the_memory_passes(tmp_path: Path) -> None:
    sorter = Sorter(tmp_path, "x", memory=1000)
    large = [bytes([i]) * 300_000 for i in (2, 1, 3)]
    for record in large:
        sorter.add(record)
    assert list(sorter.sorted()) == sorted(large)


def test_a_run_that_was_cut_short_is_noticed(tmp_path: Path) -> None:
    sorter = Sorter(tmp_path, "x", memory=1)
    sorter.add(random.Random(0).randbytes(5000))
    (run,) = tmp_path.iterdir()
    run.write_bytes(run.read_bytes()[:-100])
    with pytest.raises(StorageError, match="cut short"):
        list(sorter.sorted())
