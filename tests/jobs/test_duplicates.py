from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from pagemill.jobs.duplicates import Identities, SortedFile


@contextmanager
def settled(ids: list[str | None], memory: int = 1 << 20) -> Iterator[Identities]:
    """Rows with these ids (None: brings none); row n is on line n + 10."""
    with TemporaryDirectory() as folder:
        identities = Identities(Path(folder), memory=memory)
        for row_index, custom_id in enumerate(ids):
            if custom_id is not None:
                identities.add(row_index, row_index + 10, custom_id)
        identities.settle(len(ids))
        yield identities
        identities.close()


def test_the_later_row_is_the_duplicate_and_the_first_line_is_named() -> None:
    with settled(["a", "b", "a", None, "a", "b"]) as identities:
        assert [identities.first_line(i) for i in range(6)] == [None, None, 10, None, 10, 11]
        assert identities.duplicates == 3
        assert identities.first_duplicate() == (2, 10)


def test_without_duplicates_there_is_nothing_to_say() -> None:
    for ids in ([], [None], ["a", "b"]):
        with settled(ids) as identities:
            assert identities.duplicates == 0
            assert identities.first_duplicate() is None
            assert [identities.first_line(i) for i in range(len(ids))] == [None] * len(ids)


def test_numbers_that_are_no_rows_cost_nothing() -> None:
    with settled(["row-999999999999999999", "row-5", None]) as identities:
        assert not identities.is_claimed(5)
        assert identities.fill(2) == "row-2"


ids = st.none() | st.sampled_from(["a", "b", ""]) | st.builds("row-{}".format, st.integers(0, 8)) | st.builds(
    "row-{}-{}".format, st.integers(0, 8), st.integers(2, 3)
)  # fmt: skip


@given(st.lists(ids, max_size=10), st.sampled_from([1, 200, 1 << 20]))
def test_every_id_ends_up_with_one_row(given_ids: list[str | None], memory: int) -> None:
    first: dict[str, int] = {}
    for row_index, custom_id in enumerate(given_ids):
        if custom_id is not None:
            first.setdefault(custom_id, row_index)
    with settled(given_ids, memory) as identities:
        names = []
        for row_index, custom_id in enumerate(given_ids):
            if custom_id is None:
                name = identities.fill(row_index)
                assert name.startswith(f"row-{row_index}")
                assert identities.is_claimed(row_index) == (f"row-{row_index}" in first)
                names.append(name)
            elif first[custom_id] == row_index:
                assert identities.first_line(row_index) is None
                names.append(custom_id)
            else:
                assert identities.first_line(row_index) == first[custom_id] + 10
    assert len(set(names)) == len(names)


@given(st.sets(st.binary(min_size=4, max_size=4)), st.binary(min_size=2, max_size=4))
def test_a_sorted_file_is_searched_by_first_bytes(records: set[bytes], key: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "sorted"
        path.write_bytes(b"".join(sorted(records)))
        file = SortedFile(path, 4)
        found = file.find(key)
        matching = {record for record in records if record.startswith(key)}
        assert (found in matching) if matching else (found is None)
        assert all(file.find(record) == record for record in records)
        assert file.first() == min(records, default=None)
        file.close()
