"""Files checked without being run: what validate says of a line is what the plan would make of it."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.jobs import layout
from pagemill.jobs.cli import main
from pagemill.jobs.errors import RowFault, UsageError
from pagemill.jobs.inputs import open_source
from pagemill.jobs.plan import make_plan
from pagemill.jobs.results import iter_results
from pagemill.jobs.row import Row
from pagemill.jobs.scratch import scratch_folder
from pagemill.jobs.spec import InputRef
from pagemill.jobs.storage import StorageOptions, encode_json, open_storage, read_json
from pagemill.jobs.submission import build_spec
from pagemill.jobs.validate import Report, validate

LINES = (
    b'{"prompt": "a", "id": "x"}\nnot json\n\n{"prompt": "b", "id": "x"}\n{"prompt": 5, "id": "x"}\n'
    b'{"prompt": "c", "tempurature": 1}\n\xff\n{"messages": []}\n{"prompt": "d"}\n'
)


class OnlyShort:
    """A model that takes prompts of one character."""

    def __init__(self) -> None:
        self.seen = 0

    def check(self, row: Row) -> RowFault | None:
        self.seen += 1
        if row.prompt is not None and len(row.prompt) > 1:
            return RowFault("prompt_too_long", f"line {row.line}: too long", row.line)
        return None

    def fields(self) -> dict[str, str]:
        return {"prompts": "some"}

    def document(self) -> dict[str, Any]:
        return {"prompt_tokens": self.seen}


def judged(data: bytes, appraisal: Any = None, **fields: Any) -> tuple[Report, list[RowFault]]:
    spec = build_spec(
        "v", InputRef(key="-", size=0, etag=""), {"model": "m", "created_at": 0.0, "seed": 0, **fields}
    )
    told: list[RowFault] = []
    with scratch_folder() as folder:
        report = validate(open_source(data, StorageOptions()), spec, folder, told.append, appraisal)
    return report, told


def test_every_fault_by_line() -> None:
    report, told = judged(LINES)
    assert [(fault.line, fault.code) for fault in told] == [
        (2, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (5, "invalid_request"),
        (6, "unsupported_parameter"),
        (7, "invalid_encoding"),
        (8, "invalid_request"),
    ]
    assert told[1].message == (
        'line 4: `custom_id` "x" was given before, on line 1: give each line one of its own'
    )
    assert told[1].custom_id == "x"
    assert "temperature" in told[3].message
    assert (report.rows, report.faults) == (8, 6)


def test_a_repeated_id_is_named_printable_and_cut_short() -> None:
    ids = ["é", "x" * 500, "left\u202eright\u0085\n", "\U000e0001"]
    _, told = judged("".join(json.dumps({"prompt": "a", "id": i}) + "\n" for i in ids * 2).encode())
    assert [fault.custom_id for fault in told] == ids
    named = [fault.message.split("`custom_id` ")[1].split(" was given before, on line ") for fault in told]
    assert [(name, place.partition(":")[0]) for name, place in named] == [
        ('"é"', "1"),
        ('"' + "x" * 36 + '..."', "2"),
        ('"left\\u202eright\\u0085\\n"', "3"),
        ('"\\udb40\\udc01"', "4"),
    ]


def test_a_model_is_asked_of_rows_that_are_good_and_a_repeated_id_comes_first() -> None:
    data = b'{"prompt": "a", "id": "1"}\n{"prompt": "bb"}\n{"prompt": "cc", "id": "1"}\n{"prompt": 5}\n'
    model = OnlyShort()
    report, told = judged(data, model)
    assert [fault.code for fault in told] == ["prompt_too_long", "duplicate_custom_id", "invalid_request"]
    assert report.codes == {"prompt_too_long": 1, "duplicate_custom_id": 1, "invalid_request": 1}
    assert model.seen == 3


def test_the_job_s_parameters_count_too() -> None:
    report, told = judged(b'{"prompt": "a", "min_tokens": 9}\n', defaults={"max_tokens": 3})
    assert report.faults == 1
    assert "min_tokens" in told[0].message


@pytest.mark.parametrize(
    ("data", "words"), [(b"\n \n", "no line that is not blank"), ("{}".encode("utf-16"), "UTF-16")]
)
def test_a_file_that_cannot_be_planned_is_one_sentence(data: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        judged(data)


PIECES = st.sampled_from(
    [b'{"prompt": "a"}', b'{"prompt": "b", "id": "x"}', b'{"prompt": "b", "id": "y"}', b'{"id": "x"}',
     b'{"prompt": "z", "id": "row-1"}', b"", b"  ", b"{", b"\xff"]
)  # fmt: skip


@settings(max_examples=30)
@given(st.lists(PIECES, min_size=1, max_size=12))
def test_it_says_of_each_line_what_the_plan_says(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    data = b"\n".join([*lines, b'{"prompt": "last"}'])
    storage = open_storage(tmp_path_factory.mktemp("store"))
    info = storage.put("in.jsonl", data)
    fields = {"model": "m", "created_at": time.time(), "seed": 0}
    spec = build_spec("v", InputRef(key="in.jsonl", size=info.size, etag=info.etag), fields)
    storage.put(layout.job("v"), spec.to_json())
    plan = make_plan(storage, spec, fence="0-1", fingerprint=None, stopped=lambda: None)
    manifest = {"parts": plan["error_parts"], "version": 1}
    storage.put(layout.manifest("v"), encode_json(manifest))
    assert read_json(storage, layout.manifest("v")) is not None
    planned = [(row.line, row.error_code, row.error_message) for row in iter_results(storage, "v")]
    report, told = judged(data)
    assert [(fault.line, fault.code, fault.message) for fault in told] == planned
    assert report.rows == plan["total"]
    assert report.codes == plan["errors"]


# the command


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(word) for word in words])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_the_command_tells_faults_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "in.jsonl.gz"
    file.write_bytes(gzip.compress(LINES))
    code, out, _ = said(capsys, "validate", file)
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith("invalid_json_line: line 2: ")
    assert lines[-2].split() == ["rows", "8"]
    assert lines[-1].startswith("faults  6: 2 invalid_request")
    code, out, _ = said(capsys, "validate", file, "--json")
    documents = [json.loads(line) for line in out.splitlines()]
    assert [document["line"] for document in documents[:-1]] == [2, 4, 5, 6, 7, 8]
    assert (documents[-1]["rows"], documents[-1]["good"], documents[-1]["estimate"]) == (8, 2, None)


def test_a_sound_table_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"q": ["a", "b"]}), tmp_path / "t.parquet")
    assert said(capsys, "validate", tmp_path / "t.parquet", "--prompt-column", "q")[0] == 0
    code, _, err = said(capsys, "validate", tmp_path / "t.parquet")
    assert code == 2
    assert "--prompt-column" in err
    (tmp_path / "t.csv").write_text("q\na\n")
    code, _, err = said(capsys, "validate", tmp_path / "t.csv", "--template", "{r}")
    assert (code, "no column 'r'; the table has 'q'" in err) == (2, True)
    code, _, err = said(capsys, "validate", tmp_path / "t.csv", "--context", 5, "--prompt-column", "q")
    assert (code, "--model" in err) == (2, True)
