"""Reading a job's results: in input order, as rows, record batches, JSONL, CSV, or OpenAI's two files.

Readers trust the manifest alone and never look for parts themselves: what it lists is complete and never
changes. `partial` reads a running job by the same rule, trusting commit records. This room may not know
Redis: results are read from the store, and outlive the state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from pagemill.jobs import layout
from pagemill.jobs.commit import list_commits
from pagemill.jobs.errors import JobConflict, JobNotFound, ObjectNotFound, StorageError
from pagemill.jobs.merge import Source, merge
from pagemill.jobs.openai_batch import error_line, output_line
from pagemill.jobs.parquet import SCHEMA, SCHEMA_VERSION, ResultRow, read_batches, rows_of, to_json
from pagemill.jobs.result import TEXT
from pagemill.jobs.storage import Storage, read_json, scratch_faults

_CHOICES: Final = SCHEMA.get_field_index("choices")
_FLAT: Final = SCHEMA.set(_CHOICES, pa.field("choices", TEXT))
"""SCHEMA for files that have no lists: `choices` is JSON text, as `logprobs` and `metadata` always are."""
_FORMULA: Final = r"\A([=+\-@＝＋－＠\t\r\n\x00])"
"""How a text begins that some spreadsheet takes for a formula, or once it has skipped what it does not show
(OWASP: CSV injection)."""


def iter_results(storage: Storage, job: str, *, partial: bool = False) -> Iterator[ResultRow]:
    """All rows of a job in input order, in bounded memory.

    partial: the rows committed so far, with gaps. Raises JobNotFound, JobConflict where the job has not
    ended and partial was not asked for, and StorageError where a part is missing or damaged.
    """
    return (row for batch in iter_batches(storage, job, partial=partial) for row in rows_of(batch))


def iter_batches(storage: Storage, job: str, *, partial: bool = False) -> Iterator[pa.RecordBatch]:
    """The same as record batches of one schema (`parquet.SCHEMA`)."""
    parts = _parts(storage, job, partial)
    return merge(_source(storage, part) for part in parts if part["rows"])


def iter_columns(storage: Storage, job: str, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Some columns of all rows of a job that has ended, in no order. Raises as `iter_results` does."""
    for part in _parts(storage, job, partial=False):
        if part["rows"]:
            with _source(storage, part, columns).open() as batches:
                yield from batches


def to_jsonl(rows: Iterable[ResultRow], output: BinaryIO) -> int:
    """Every row as one JSON object a line, without what is null; returns how many."""
    count = 0
    for row in rows:
        _write_line(output, as_document(row))
        count += 1
    return count


def to_csv(batches: Iterable[pa.RecordBatch], output: BinaryIO, *, safe: bool = False) -> int:
    """Every row as a record of CSV, after a head; returns how many.

    As RFC 4180 has it, but for lines that end in \\n alone. Texts are in quotes, so that an empty one is told
    from null, which is an empty cell without. `choices` are JSON text, as in JSONL.

    safe: an apostrophe before each text that a spreadsheet may take for a formula, which quotes do not
    prevent. Without it a text is what the model said.
    """
    count = 0
    with csv.CSVWriter(output, _FLAT) as writer:
        for batch in batches:
            flat = _flat(batch)
            writer.write_batch(_no_formulas(flat) if safe else flat)
            count += batch.num_rows
    return count


def to_openai(
    rows: Iterable[ResultRow], output: BinaryIO, errors: BinaryIO, *, created: int
) -> tuple[int, int]:
    """OpenAI's batch output and error files; returns the number of lines in each.

    A response was created when its row had finished. created: said of rows that do not know when, those of
    parts of version 1; in seconds since 1970.
    """
    done = failed = 0
    for row in rows:
        if row.status == "completed":
            done += 1
            at = created if row.finished_at is None else int(row.finished_at)
            _write_line(output, output_line(row, at))
        else:
            failed += 1
            _write_line(errors, error_line(row))
    return done, failed


def ended_at(storage: Storage, job: str) -> int:
    """When the job ended, in whole seconds since 1970; of one that has not, when it was submitted."""
    found = read_json(storage, layout.manifest(job)) or read_json(storage, layout.job(job))
    if found is None:
        raise JobNotFound(f"Job {job} is no longer in {storage.url}.")
    return int(found.get("finished_at") or found["created_at"])


def _parts(storage: Storage, job: str, partial: bool) -> list[dict[str, Any]]:
    manifest = read_json(storage, layout.manifest(job))
    parts: list[dict[str, Any]]
    if manifest is not None:
        parts = manifest["parts"]
    elif partial:
        plan = read_json(storage, layout.plan(job))
        if plan is None:
            _must_exist(storage, job)
            return []
        records = list_commits(storage, job)
        parts = [*plan.get("error_parts", ()), *(record["part"] for record in records.values())]
    else:
        _must_exist(storage, job)
        raise JobConflict(
            f"{job} has not ended: wait for it, or take what is committed so far: --partial, or partial=True."
        )
    for part in parts:
        if part["schema_version"] > SCHEMA_VERSION:
            raise StorageError(f"{part['key']} was written by a newer Pagemill: upgrade this one.")
    return parts


def _must_exist(storage: Storage, job: str) -> None:
    if storage.head(layout.job(job)) is None:
        raise JobNotFound(
            f"There is no job {job} in {storage.url}; --store or PAGEMILL_STORE names another store."
        )


def _source(storage: Storage, part: dict[str, Any], columns: list[str] | None = None) -> Source:
    @contextmanager
    def opened() -> Iterator[Iterator[pa.RecordBatch]]:
        key = part["key"]
        try:
            with storage.as_file(key) as path:
                with scratch_faults(f"read {key}"):
                    size = path.stat().st_size
                if size != part["bytes"]:
                    raise StorageError(f"The part {key} in {storage.url} is damaged: its size is wrong.")
                yield read_batches(path, columns=columns, name=key)
        except ObjectNotFound:
            raise StorageError(f"The part {key} is missing from {storage.url}.") from None

    return Source(part["min_row_index"], part["max_row_index"], opened)


def _flat(batch: pa.RecordBatch) -> pa.RecordBatch:
    found = batch.column(_CHOICES).to_pylist()
    texts = [None if choices is None else to_json(_plain_choices(choices)) for choices in found]
    columns = batch.columns
    columns[_CHOICES] = pa.array(texts, TEXT)
    return pa.RecordBatch.from_arrays(columns, schema=_FLAT)


def _no_formulas(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [
        pc.replace_substring_regex(column, _FORMULA, r"'\1") if column.type == TEXT else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _write_line(output: BinaryIO, document: dict[str, Any]) -> None:
    output.write(to_json(document).encode() + b"\n")


def as_document(row: ResultRow) -> dict[str, Any]:
    """A row as plain values, without what is null."""
    document = {name: getattr(row, name) for name in ResultRow.__slots__}
    for name in ("logprobs", "metadata"):
        if document[name] is not None:
            document[name] = json.loads(document[name])
    if row.choices is not None:
        document["choices"] = _plain_choices(row.choices)
    return {name: value for name, value in document.items() if value is not None}


def _plain_choices(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what is null, and with log-probabilities as values instead of as their JSON text."""
    plain = [{name: value for name, value in choice.items() if value is not None} for choice in choices]
    for choice in plain:
        if isinstance(choice.get("logprobs"), str):
            choice["logprobs"] = json.loads(choice["logprobs"])
    return plain
