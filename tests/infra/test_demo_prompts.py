"""infra/demo.jsonl shows what a real file is like: both shapes, and bad lines of several kinds among them."""

from collections import Counter
from pathlib import Path

from pagemill.jobs.errors import RowFault
from pagemill.jobs.lines import Line, read_lines
from pagemill.jobs.spec import InputRef, JobSpec, Row, parse_row

DEMO = Path(__file__).parents[2] / "infra" / "demo.jsonl"
SPEC = JobSpec(job="demo", model="m", created_at=0.0, input=InputRef(key="k", size=1, etag="e"), seed=1)


def lines() -> list[Line]:
    with DEMO.open("rb") as file:
        return list(read_lines(file))


def test_the_demo_has_about_forty_good_rows_of_every_shape() -> None:
    rows = [row for row in (parse_row(line, SPEC) for line in lines()) if isinstance(row, Row)]
    assert 38 <= len(rows) <= 46
    shapes = Counter((row.kind, row.requested_model is not None, row.filled_id) for row in rows)
    assert min(shapes[kind, True, False] for kind in ("chat", "completion")) >= 1  # as for another service
    assert min(shapes[kind, False, False] for kind in ("chat", "completion")) >= 1  # bare
    assert shapes["completion", False, True] >= 1  # bare, without an id
    assert all(16 <= row.params["max_tokens"] <= 96 for row in rows)
    assert {"stop", "temperature"} <= {name for row in rows for name in row.params}


def test_the_demo_has_bad_lines_of_many_kinds_and_a_blank_one() -> None:
    found = lines()
    faults = [row.code for row in (parse_row(line, SPEC) for line in found) if isinstance(row, RowFault)]
    assert set(faults) == {
        "invalid_json_line",
        "invalid_request",
        "invalid_encoding",
        "unsupported_parameter",
        "url_mismatch",
    }
    ids = Counter(row.custom_id for row in (parse_row(line, SPEC) for line in found) if isinstance(row, Row))
    assert max(ids.values()) == 2  # one is given twice, which only the planner can see
    assert found[-1].number > len(found)
