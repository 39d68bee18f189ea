"""JSONTestSuite through the reader: every file's raw bytes as a line between two good rows.

The suite is not part of this project. The folder is named by PAGEMILL_JSON_SUITE; its usual place beside
the repository is tried too.
"""

import io
import os
from pathlib import Path

import pytest

from pagemill.jobs.errors import TEXT_CODES, RowFault
from pagemill.jobs.json_strict import InvalidJson, parse_json
from pagemill.jobs.lines import read_lines
from pagemill.jobs.spec import InputRef, JobSpec, Row, parse_row

BEFORE = b'{"custom_id": "before", "prompt": "one"}'
AFTER = b'{"custom_id": "after", "prompt": "two"}'
SPEC = JobSpec(job="suite", model="m", created_at=0.0, input=InputRef(key="k", size=1, etag="e"), seed=1)


def files() -> list[Path]:
    usual = Path(__file__).parents[2].parent / "shared" / "cases" / "json"
    folder = Path(os.environ.get("PAGEMILL_JSON_SUITE") or usual)
    return sorted(folder.rglob("*_*.json"))


FILES = files()
if not FILES:
    pytest.skip(
        "JSONTestSuite is not here: name its folder in PAGEMILL_JSON_SUITE to run these",
        allow_module_level=True,
    )


def test_the_suite_is_the_whole_one() -> None:
    kinds = [path.name[0] for path in FILES]
    assert (kinds.count("y"), kinds.count("n"), kinds.count("i")) == (95, 188, 35)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_as_a_line_harms_neither_neighbour(path: Path) -> None:
    content = path.read_bytes()
    lines = list(read_lines(io.BytesIO(b"\n".join([BEFORE, content, AFTER]) + b"\n")))
    first, *between, last = [parse_row(line, SPEC) for line in lines]
    assert isinstance(first, Row)
    assert (first.custom_id, first.prompt, first.line) == ("before", "one", 1)
    assert isinstance(last, Row)
    assert (last.custom_id, last.prompt, last.line) == ("after", "two", 3 + content.count(b"\n"))
    assert last.row_index == len(lines) - 1
    pieces = [piece for piece in content.split(b"\n") if piece.strip(b" \t\r")]
    assert len(between) == len(pieces)
    # No file of the suite holds a request, so each piece is a fault that names its line.
    for line, fault in zip(lines[1:-1], between, strict=True):
        assert isinstance(fault, RowFault)
        assert fault.code in TEXT_CODES
        assert f"line {line.number}" in fault.message


@pytest.mark.parametrize("path", [path for path in FILES if path.name[0] == "n"], ids=lambda path: path.stem)
def test_what_every_strict_parser_rejects_is_rejected(path: Path) -> None:
    with pytest.raises(InvalidJson):
        parse_json(path.read_bytes())


# What the suite accepts and our promises do not: keys given twice.
STRICTER = {"y_object_duplicated_key", "y_object_duplicated_key_and_value"}


@pytest.mark.parametrize("path", [path for path in FILES if path.name[0] == "y"], ids=lambda path: path.stem)
def test_what_every_strict_parser_accepts_is_accepted(path: Path) -> None:
    content = path.read_bytes()
    if path.stem in STRICTER:
        with pytest.raises(InvalidJson, match="twice"):
            parse_json(content)
    else:
        parse_json(content)
