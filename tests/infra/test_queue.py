"""The load run of the job layer: what it is fed, what it counts, and that its figures belong to one job.

Nothing here looks at a clock: times are for machines on which nothing else runs.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from pagemill.jobs.lines import Line
from pagemill.jobs.request import parse_row
from pagemill.jobs.row import Row
from pagemill.jobs.spec import InputRef, JobSpec

BENCH = Path(__file__).parents[2] / "infra" / "bench"
QUEUE = BENCH / "queue"
STAGES = ["submit", "plan", "read", "hand over", "seal", "commit", "finalize"]


@pytest.fixture(scope="module")
def parts() -> Iterator[dict[str, ModuleType]]:
    """The modules that need no server. They find one another beside themselves, as when one is run."""
    sys.path.insert(0, str(QUEUE))
    names = ("plot", "processes", "rows")
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(QUEUE))
        for name in names:
            sys.modules.pop(name, None)


def run_queue(tmp_path: Path, *words: str) -> dict[str, Any]:
    found = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(QUEUE), *words, "--folder", str(tmp_path), "--json", str(found)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(found.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"], "it leaves something behind"
    return document


def test_rows_are_the_same_every_time_of_one_size_and_good(
    parts: dict[str, ModuleType], tmp_path: Path
) -> None:
    write = parts["rows"].write_rows
    size = write(tmp_path / "a", 1200, 500)
    write(tmp_path / "b", 1200, 500)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    lines = (tmp_path / "a").read_bytes().splitlines(keepends=True)
    assert len(lines) == 1200
    assert size == sum(map(len, lines))
    assert all(480 <= len(line) <= 500 for line in lines)
    assert len(set(lines)) == 1200


@pytest.mark.parametrize("row_bytes", [1, 60, 100, 2000])
def test_rows_of_any_size_are_accepted(parts: dict[str, ModuleType], tmp_path: Path, row_bytes: int) -> None:
    parts["rows"].write_rows(tmp_path / "a", 5, row_bytes)
    job = JobSpec(
        job="a", model="m", created_at=0.0, input=InputRef(key="-", size=0, etag=""), seed=0, defaults={}
    )
    for number, data in enumerate((tmp_path / "a").read_bytes().splitlines()):
        row = parse_row(Line(number + 1, number, data), job)
        assert isinstance(row, Row), row
        assert row.custom_id == f"r{number}"


def test_a_process_is_seen_to_compute_and_to_hold_memory(parts: dict[str, ModuleType]) -> None:
    words = "x = b'1' * 50_000_000\nfor _ in range(3_000_000): pass\nprint(len(x), flush=True)\ninput()"
    seen = parts["processes"]
    command = [sys.executable, "-c", words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        assert seen.cpu_seconds(child.pid) > 0
        assert seen.main_thread_seconds(child.pid) > 0
        assert 50 < seen.peak_mb(child.pid) < 500
        assert child.pid in seen.children(os.getpid())
        child.kill()
    assert seen.cpu_seconds(child.pid) == seen.peak_mb(child.pid) == 0.0


def test_the_plot_holds_a_line_of_each_kind_for_each_number_of_workers(parts: dict[str, ModuleType]) -> None:
    runs = [
        {
            "rows": rows,
            "workers": workers,
            "wall_seconds": {"run": rows / 1000 / workers},
            "cpu_us_a_row": {"sum": 200.0},
        }
        for rows in (1000, 2000, 4000)
        for workers in (1, 2)
    ]
    tree = ElementTree.fromstring(parts["plot"].plot(runs))
    space = "{http://www.w3.org/2000/svg}"
    assert len(tree.findall(f"{space}polyline")) == 1 + 4  # the axes, then the lines
    assert len(tree.findall(f"{space}circle")) == 12
    words = [text.text for text in tree.findall(f"{space}text")]
    assert "4,000 rows" in words
    assert {"seconds, 1 worker", "CPU seconds, 2 workers"} <= set(words)


@pytest.mark.parametrize("store", ["local", "s3"])
def test_a_load_run_says_what_each_stage_cost(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMILL_SEAL_ROWS", "50")
    words = ("--rows", "700", "--workers", "2", "--row-bytes", "200", "--store", store)
    (run,) = run_queue(tmp_path, *words)["runs"]
    assert (run["rows"], run["workers"], run["store"]) == (700, 2, store)
    costs = run["cpu_us_a_row"]
    assert [name for name in costs if name in STAGES] == STAGES
    assert abs(sum(costs[name] for name in STAGES) - costs["sum"]) < 1
    assert all(costs[name] > 0 for name in ("submit", "read", "hand over", "seal", "commit"))
    assert all(run["peak_mb"][who] > 10 for who in ("client", "planner", "worker", "reader"))
    assert set(run["other_cpu_us_a_row"]) == {"engine", "redis"} | ({"s3"} if store == "s3" else set())
    # The plan may be leased before the client has heard that its job was taken.
    assert -1000 < run["submit_to_first_lease_ms"] <= run["submit_to_first_shard_ms"]


def test_a_plan_alone_says_what_it_took(tmp_path: Path) -> None:
    (run,) = run_queue(tmp_path, "--plan", "--rows", "5000", "--row-bytes", "100")["runs"]
    assert run["rows"] == 5000
    assert run["shards"] > 1
    assert run["plan_cpu_us_a_row"] > 0
    assert run["peak_mb"]["planner"] > 10


def test_a_scale_run_prints_one_line_a_run(tmp_path: Path) -> None:
    picture = tmp_path / "scale.svg"
    words = (
        "--scale",
        "--rows",
        "200,400",
        "--workers",
        "1",
        "--row-bytes",
        "100",
        "--folder",
        str(tmp_path),
    )
    done = subprocess.run(
        [sys.executable, str(QUEUE), *words, "--plot", str(picture)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.split()[:2] == ["rows", "workers"]
    assert [line.split()[:2] for line in lines] == [["200", "1"], ["400", "1"]]
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_a_senseless_number_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(QUEUE), "--rows", "0"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "1 or more" in done.stderr
