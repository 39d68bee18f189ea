from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_rows import rows_of

from pagemill.jobs.errors import StorageError
from pagemill.jobs.merge import Source, merge
from pagemill.jobs.parquet import BATCH_ROWS, batch_of


class Runs:
    """Runs in memory that count how many of them are open."""

    def __init__(self, runs: list[list[int]], batch: int = 3) -> None:
        self.open = self.most = self.opened = 0
        self.sources = [self._source(run, batch) for run in runs]

    def _source(self, run: list[int], batch: int) -> Source:
        @contextmanager
        def opened() -> Iterator[Iterator[pa.RecordBatch]]:
            self.opened += 1
            self.open += 1
            self.most = max(self.most, self.open)
            yield (batch_of(rows_of(run[i : i + batch])) for i in range(0, len(run), batch))
            self.open -= 1

        return Source(min(run, default=-1), max(run, default=-1), opened)


def indexes(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [i for batch in batches for i in batch.column("row_index").to_pylist()]


@st.composite
def any_runs(draw: st.DrawFn) -> list[list[int]]:
    owner = draw(st.dictionaries(st.integers(0, 500), st.integers(0, 12), max_size=60))
    return [sorted(i for i, run in owner.items() if run == number) for number in range(13)]


@given(runs=any_runs(), batch=st.integers(1, 5), fan_in=st.integers(2, 20))
@settings(deadline=None, max_examples=40)
def test_any_runs_become_one_sorted_run(runs: list[list[int]], batch: int, fan_in: int) -> None:
    counted = Runs(runs, batch)
    assert indexes(merge(counted.sources, fan_in=fan_in)) == sorted(i for run in runs for i in run)
    assert counted.open == 0
    assert counted.opened == 13
    assert counted.most <= fan_in


def test_the_rows_stay_whole() -> None:
    found = [row for b in merge(Runs([[0, 3, 4], [1, 2, 9]], 2).sources) for row in b.to_pylist()]
    assert [row["text"] for row in found] == [f"text {i} " for i in (0, 1, 2, 3, 4, 9)]


def test_runs_that_follow_one_another_are_open_one_at_a_time() -> None:
    counted = Runs([list(range(i * 10, i * 10 + 10)) for i in range(200)])
    assert indexes(merge(counted.sources, fan_in=4)) == list(range(2000))
    assert counted.most == 1


def test_many_runs_over_the_whole_range_are_open_few_at_a_time() -> None:
    counted = Runs([list(range(i, 1500, 100)) for i in range(100)], batch=8)
    assert indexes(merge(counted.sources, fan_in=8)) == list(range(1500))
    assert counted.most <= 8


def test_batches_stay_small() -> None:
    counted = Runs([list(range(i, 20_000, 7)) for i in range(7)], batch=1000)
    assert max(batch.num_rows for batch in merge(counted.sources)) <= BATCH_ROWS


def test_a_row_in_two_runs_is_an_error() -> None:
    for fan_in in (2, 10):
        with pytest.raises(StorageError, match="same row"):
            list(merge(Runs([[1, 5], [2, 5], [3, 7]]).sources, fan_in=fan_in))


def test_a_reader_that_stops_early_closes_what_is_open() -> None:
    for fan_in in (2, 100):
        counted = Runs([list(range(i, 900, 9)) for i in range(9)])
        batches = merge(counted.sources, fan_in=fan_in)
        next(batches)
        batches.close()  # type: ignore[attr-defined]
        assert counted.open == 0


def test_an_error_in_a_run_reaches_the_reader() -> None:
    @contextmanager
    def broken() -> Iterator[Any]:
        def batches() -> Iterator[pa.RecordBatch]:
            yield batch_of(rows_of([3]))
            raise RuntimeError("damaged")

        yield batches()

    counted = Runs([[1, 2, 4, 8]], 1)
    with pytest.raises(RuntimeError, match="damaged"):
        indexes(merge([*counted.sources, Source(3, 9, broken)]))
    assert counted.open == 0


def test_nothing_merges_to_nothing() -> None:
    assert list(merge([])) == []
    assert list(merge(Runs([[], []]).sources)) == []
