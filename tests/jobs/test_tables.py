"""Frames, Parquet and CSV submitted, with the same guarantees as JSONL: one output row for each of theirs."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_worker import unique, work

from pagemill.jobs.client import Client
from pagemill.jobs.columns import Columns
from pagemill.jobs.errors import UsageError
from pagemill.jobs.inputs import open_source
from pagemill.jobs.storage import StorageOptions
from pagemill.jobs.tables import rows_at_once

QUESTIONS = ["one", None, 'three, "quoted"\nand é']
DATA: dict[str, list[Any]] = {"key": [1, 2, 3], "question": QUESTIONS, "mood": ["a", "b", "c"]}
ASKED = Columns(prompt="question", id="key")


def lines(prompts: Any, columns: Columns = ASKED, name: str | None = None) -> list[Any]:
    source = open_source(prompts, StorageOptions(), columns=columns, name=name)
    return [json.loads(line) for line in b"".join(source.chunks()).splitlines()]


class Exporter:
    """What is known of a frame is that it exports a stream."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


FRAMES = {
    "pyarrow": lambda: pa.table(DATA),
    "batch": lambda: pa.RecordBatch.from_pydict(DATA),
    "stream": lambda: pa.table(DATA).to_reader(),
    "pandas": lambda: pd.DataFrame(DATA),
    "polars": lambda: pl.DataFrame(DATA),
    "capsule": lambda: Exporter(pa.table(DATA)),
    "dicts": lambda: pa.table(DATA).to_pylist(),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_the_same_lines_from_every_frame(kind: str) -> None:
    first, second, third = lines(FRAMES[kind]())
    assert (first, third) == ({"custom_id": "1", "prompt": "one"}, {"custom_id": "3", "prompt": QUESTIONS[2]})
    assert second["custom_id"] == "2"
    assert "`question` is null" in second["unreadable"]


@pytest.mark.parametrize("make", [pa.chunked_array, pa.array, pl.Series, list])
def test_one_column_is_a_list_of_prompts(make: Any) -> None:
    assert lines(make(["a", "b"]), Columns()) == [{"prompt": "a"}, {"prompt": "b"}]
    assert lines(make(["a"]), Columns(chat=True)) == [{"messages": [{"role": "user", "content": "a"}]}]


def test_a_column_of_messages_and_fields_of_a_line() -> None:
    table = pa.table({"messages": [[{"role": "user", "content": "hi"}]], "max_tokens": [4]})
    made = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    assert lines(table, Columns()) == [made]
    assert lines(table, Columns(prompt="messages")) == [{"messages": made["messages"]}]


def test_dotted_and_odd_names_of_columns_are_names(tmp_path: Path) -> None:
    table = pa.table({"a.b": ["x"], "a": [{"b": "y"}], "Größe [m]": [1.5]})
    pq.write_table(table, tmp_path / "t.parquet")
    columns = Columns(template="{a.b} {Größe [m]}")
    assert lines(tmp_path / "t.parquet", columns) == lines(table, columns) == [{"prompt": "x 1.5"}]


CSV = (
    'key,question,mood\r\n1,one,a\r\n\r\n2,x,b,extra\r\n3,"three, ""quoted""\r\nand é",c\r\n4,"no"t,d\r\n'
    "5,,e\r\n"
)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("t.csv", CSV.encode()),
        ("t.CSV", b"\xef\xbb\xbf" + CSV.encode()),
        ("t.csv.gz", gzip.compress(CSV.encode())),
    ],
)
def test_csv_records_that_are_none_are_error_rows(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    made = lines(tmp_path / name)
    assert made == lines(io.BytesIO(data), name=name)
    assert made[0] == {"custom_id": "1", "prompt": "one"}
    assert "4 cells, and the header 3" in made[1]["unreadable"]
    assert made[2] == {"custom_id": "3", "prompt": 'three, "quoted"\r\nand é'}
    assert "record on line 7 of" in made[3]["unreadable"]
    assert made[4] == {"custom_id": "5", "prompt": ""}


def test_tsv_text_that_is_no_utf_8_and_a_quote_that_is_never_closed() -> None:
    source = open_source(io.BytesIO(b"question\tkey\nok\t1\n\xff\t2\n\"open\t3\n"), StorageOptions(),
                         columns=ASKED, name="t.tsv")  # fmt: skip
    first, second, third = b"".join(source.chunks()).split(b"\n")[:3]
    assert json.loads(first) == {"custom_id": "1", "prompt": "ok"}
    with pytest.raises(UnicodeDecodeError):
        second.decode()  # the plan says so of this row, as of any line
    assert "unexpected end of data" in json.loads(third)["unreadable"]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("t.csv", b"", "is empty"),
        ("t.csv", b"a,b\n1,2\n", "no column 'question'"),
        ("t.csv", 'question,key\n"'.encode("utf-16"), "UTF-16"),
        ("t.csv.gz", b"question,key\n", "sound gzip"),
        ("t.parquet", b"question,key\n", "cannot be read"),
        ("t.parquet.gz", b"", "packed twice"),
        ("t.jsonl", b'{"prompt": "x"}', "taken for JSONL"),
    ],
)
def test_a_file_that_is_no_such_table_is_one_sentence(name: str, data: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        lines(io.BytesIO(data), name=name)


def test_a_cell_without_end_is_refused_in_bounded_memory() -> None:
    def endless() -> Iterator[bytes]:
        yield b'question,key\n"'
        while True:
            yield b"x" * 65536

    class Stream(io.RawIOBase):
        chunks = endless()

        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            return next(self.chunks)

    with pytest.raises(UsageError, match="longer than 16,777,216 characters"):
        lines(Stream(), name="t.csv")


def test_a_damaged_parquet_file_leaves_no_rows_unsaid(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"question": [f"q{i}" * 50 for i in range(20_000)]}), path, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 4000] = b"\x99" * 4000
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"t\.parquet cannot be read"):
        lines(path, Columns(prompt="question"))


def test_a_dictionary_that_repeats_a_huge_cell_is_read_a_few_rows_at_a_time(tmp_path: Path) -> None:
    """Of a file of a few hundred bytes whose batch would have been eight gigabytes."""
    path = tmp_path / "t.parquet"
    cell = "x" * (32 << 20)
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array([cell]))
    table = pa.table({"cell": repeated, "other": [f"{i}" for i in range(300)]})
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30, write_statistics=False)
    assert path.stat().st_size < 5000
    footer = pq.ParquetFile(path).metadata
    assert rows_at_once(footer, ["cell"]) == 31
    assert rows_at_once(footer, ["other"]) == 256
    pq.write_table(pa.table({"cell": [cell]}), path, compression="zstd", use_dictionary=False)
    assert rows_at_once(pq.ParquetFile(path).metadata, ["cell"]) == 256  # all of it is this one cell
    assert len(lines(path, Columns(prompt="cell"))[0]["prompt"]) == len(cell)


MEASURE = """
import resource, sys
from pagemill.jobs.columns import Columns
from pagemill.jobs.inputs import open_source
from pagemill.jobs.storage import StorageOptions
from pagemill.jobs.tables import rows_at_once
import pyarrow.parquet
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = 0
for chunk in open_source(sys.argv[1], StorageOptions(), columns=Columns(template="{a} {a}")).chunks():
    size += len(chunk)
print(size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
"""


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_table_larger_than_its_memory_is_streamed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"t.{kind}"
    table = pa.table({"a": ["x" * 2000 + str(i) for i in range(40_000)]})  # 80 MB, twice over as prompts
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=10_000, use_dictionary=False)
    else:
        path.write_text("a\n" + "\n".join(table["a"].to_pylist()) + "\n")
    done = subprocess.run([sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True)
    size, grown_kib = map(int, done.stdout.split())
    assert size > 160_000_000
    assert grown_kib < 80_000


async def test_a_frame_becomes_a_job_with_a_result_for_each_row(client: Client) -> None:
    model = unique("model")
    frame = pd.DataFrame(DATA)
    job = await client.submit(
        frame,
        model=model,
        template="{question} as {mood}",
        id_column="key",
        job_id=f"j-{model}",
        max_tokens=5,
    )
    again = await client.submit(
        pl.DataFrame(DATA), model=model, template="{question} as {mood}", id_column="key", job_id=job.id,
        max_tokens=5,
    )  # fmt: skip
    assert again.existed
    await work(await client.state(), client.storage, model)
    rows = await job.results().list()
    assert [row.custom_id for row in rows] == ["1", "2", "3"]
    assert [row.status for row in rows] == ["completed", "failed", "completed"]
    assert rows[0].text == "answer to one as a"
    assert (
        rows[1].error_message == "line 2: the column `question` is null, and the template needs it: fill it"
    )


async def test_results_as_frames_dicts_and_streams(client: Client) -> None:
    model = unique("model")
    job = await client.submit(["a", {"prompt": 5}, "c"], model=model)
    await work(await client.state(), client.storage, model)
    results = job.results()
    frame = await results.pandas()
    assert list(frame["text"].fillna("")) == ["answer to a", "", "answer to c"]
    assert pl.DataFrame(results.sync)["row_index"].to_list() == [0, 1, 2]
    assert results.sync.reader().read_all() == await results.table()
    dicts = [row async for row in results.dicts()]
    assert [row.get("text") for row in dicts] == ["answer to a", None, "answer to c"]
    assert dicts == list(results.sync.dicts())
    assert "error_code" not in dicts[0]


async def test_parquet_is_read_from_s3(s3: Any, redis_url: str, tmp_path: Path) -> None:
    model = unique("model")
    pq.write_table(pa.table(DATA), tmp_path / "t.parquet")
    async with Client(redis_url, s3.url, storage_options=s3.options) as client:
        client.storage.put_file("in/t.parquet", tmp_path / "t.parquet")
        client.storage.put("in/t.csv", CSV.encode())
        for name, count in (("t.parquet", 3), ("t.csv", 5)):
            job = await client.submit(f"{s3.url}/in/{name}", model=model, prompt_column="question")
            await work(await client.state(), client.storage, model)
            assert (await job.status()).total == count
        with pytest.raises(UsageError, match="There is no object"):
            await client.submit(f"{s3.url}/in/none.parquet", model=model, prompt_column="question")
