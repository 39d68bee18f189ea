import gzip
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill.jobs import layout
from pagemill.jobs import plan as plan_module
from pagemill.jobs.errors import StorageError
from pagemill.jobs.parquet import ResultRow, read_rows
from pagemill.jobs.plan import make_plan, read_shard
from pagemill.jobs.row import Row
from pagemill.jobs.spec import InputRef, JobSpec, new_job_id
from pagemill.jobs.storage import Storage, open_storage


def accept(storage: Storage, content: bytes, suffix: str = "", **fields: Any) -> JobSpec:
    job = fields.pop("job", None) or new_job_id()
    info = storage.put(layout.input(job, suffix), content)
    source = InputRef(key=info.key, size=info.size, etag=info.etag, name="in.jsonl", suffix=suffix)  # type: ignore[arg-type]
    return JobSpec(**{"job": job, "model": "m", "created_at": 0.0, "input": source, "seed": 1, **fields})


def planned(storage: Storage, spec: JobSpec, fence: str = "0-1", **options: Any) -> dict[str, Any]:
    options = {"fingerprint": "fp", "stopped": lambda: None, **options}
    return make_plan(storage, spec, fence=fence, **options)


def jsonl(docs: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(doc).encode() + b"\n" for doc in docs)


def rows_of(storage: Storage, plan: dict[str, Any]) -> list[Row]:
    return [row for entry in plan["shards"] for row in read_shard(storage, entry)]


def faults_of(storage: Storage, plan: dict[str, Any]) -> list[ResultRow]:
    return [row for part in plan["error_parts"] for row in read_rows(storage.get(part["key"]))]


def check(storage: Storage, plan: dict[str, Any]) -> None:
    """What is true of every plan."""
    rows, faults = rows_of(storage, plan), faults_of(storage, plan)
    indexes = [row.row_index for row in rows] + [fault.row_index for fault in faults]
    assert sorted(indexes) == list(range(plan["total"]))
    assert plan["failed"] == len(faults) == sum(plan["errors"].values())
    assert plan["errors"] == dict(Counter(fault.error_code for fault in faults))
    assert [fault.row_index for fault in faults] == sorted(fault.row_index for fault in faults)
    assert [entry["shard"] for entry in plan["shards"]] == list(range(len(plan["shards"])))
    assert [entry["rows"] for entry in plan["shards"]] == [
        len(read_shard(storage, e)) for e in plan["shards"]
    ]
    ids = [row.custom_id for row in rows]
    assert len(set(ids)) == len(ids)


MIXED = b"\n".join(
    [
        b'{"custom_id": "a", "prompt": "one"}',
        b"",
        b'{"custom_id": "b", "prompt": "two", "tools": [1]}',
        b'{"custom_id": "a", "prompt": "three"}',
        b"{oops",
        b'{"prompt": "caf\xe9"}',
        b'{"prompt": "six"}\r',
        b'{"custom_id": "b", "prompt": "seven"}',
    ]
)


def test_a_plan_holds_every_line_once_as_a_row_or_a_fault(storage: Storage) -> None:
    spec = accept(storage, MIXED)
    seen: list[int] = []
    plan = planned(storage, spec, progress=seen.append)
    check(storage, plan)
    assert (plan["version"], plan["job"], plan["fence"], plan["fingerprint"]) == (1, spec.job, "0-1", "fp")
    assert (plan["total"], plan["failed"]) == (7, 5)
    assert sorted((row.row_index, row.line, row.custom_id, row.prompt) for row in rows_of(storage, plan)) == [
        (0, 1, "a", "one"),
        (5, 7, "row-5", "six"),
    ]
    assert [(f.row_index, f.line, f.custom_id, f.error_code) for f in faults_of(storage, plan)] == [
        (1, 3, "b", "unsupported_parameter"),
        (2, 4, "a", "duplicate_custom_id"),
        (3, 5, "row-3", "invalid_json_line"),
        (4, 6, "row-4", "invalid_encoding"),
        (6, 8, "b", "duplicate_custom_id"),
    ]
    assert faults_of(storage, plan)[1].error_message == (
        'line 4: `custom_id` "a" was given before, on line 1: give each line one of its own'
    )
    assert seen[:1] == [] or seen[0] >= 1


def test_planning_again_adopts_the_plan_that_is_there(local_storage: Storage) -> None:
    spec = accept(local_storage, MIXED)
    first = planned(local_storage, spec)
    objects = {info.key for info in local_storage.list(layout.root(spec.job))}
    assert planned(local_storage, spec, fence="0-2") == first
    assert {info.key for info in local_storage.list(layout.root(spec.job))} == objects


def test_of_two_planners_one_counts_and_the_other_leaves_only_orphans(storage: Storage) -> None:
    spec = accept(storage, MIXED)
    inner: dict[str, Any] = {}

    def overtaken() -> str | None:
        # Asked for the last time when everything but plan.json is written: let the other one be faster.
        if not inner and any(True for _ in storage.list(layout.shards(spec.job))):
            inner.update(planned(storage, spec, fence="0-2"))
        return None

    plan = planned(storage, spec, fence="0-1", stopped=overtaken)
    assert plan["fence"] == "0-2"
    assert plan == inner
    check(storage, plan)
    named = {entry["key"] for entry in plan["shards"]} | {part["key"] for part in plan["error_parts"]}
    written = {info.key for info in storage.list(layout.shards(spec.job))}
    written |= {info.key for info in storage.list(layout.parts(spec.job))}
    assert named < written
    assert all("0-1" in key for key in written - named)
    assert all("0-2" in key for key in named)


def test_the_same_input_gives_the_same_shards(local_storage: Storage) -> None:
    content = jsonl({"prompt": f"number {i % 50} of {i}", "max_tokens": 5} for i in range(500))
    one, two = (planned(local_storage, accept(local_storage, content, shard_rows=40)) for _ in range(2))
    digests = [[entry["sha256"] for entry in plan["shards"]] for plan in (one, two)]
    assert digests[0] == digests[1]
    assert len(digests[0]) > 5


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_input(local_storage: Storage, suffix: str) -> None:
    pack = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    plan = planned(local_storage, accept(local_storage, pack(MIXED), suffix))
    check(local_storage, plan)
    assert plan["total"] == 7


def test_rows_that_share_a_prefix_lie_together_and_shards_end_between_groups(local_storage: Storage) -> None:
    documents = {n: f"Document {n}: " + f"sentence {n} of it. " * 200 for n in range(30)}
    docs = [
        {"prompt": f"{text}Question {q}", "max_tokens": 4} for q in range(6) for text in documents.values()
    ]
    random.Random(0).shuffle(docs)
    plan = planned(local_storage, accept(local_storage, jsonl(docs), shard_rows=25))
    check(local_storage, plan)
    owner = [(row.prompt or "").split(":")[0] for row in rows_of(local_storage, plan)]
    assert sum(left != right for left, right in pairwise(owner)) == len(documents) - 1
    shards = [
        {(row.prompt or "").split(":")[0] for row in read_shard(local_storage, e)} for e in plan["shards"]
    ]
    assert sum(map(len, shards)) == len(documents)
    assert all(entry["rows"] <= 25 for entry in plan["shards"])


def test_shards_are_cut_by_estimated_work(local_storage: Storage) -> None:
    content = jsonl({"prompt": f"{i} " * 40, "max_tokens": 60} for i in range(300))
    plan = planned(local_storage, accept(local_storage, content, shard_tokens=1000))
    check(local_storage, plan)
    assert all(entry["tokens"] <= 1000 for entry in plan["shards"])
    assert all(entry["tokens"] >= 500 for entry in plan["shards"][:-1])


def test_a_filled_id_gives_way_to_a_given_one(local_storage: Storage) -> None:
    docs: list[Any] = [{"prompt": "a"}, {"prompt": "b", "id": "row-0"}, {"prompt": "c", "id": "row-0-2"}]
    docs += [{"prompt": ""}, {"prompt": "d", "id": "row-3"}, {"prompt": "e", "id": "row-5"}, {"prompt": "f"}]
    docs += [{"prompt": "g", "id": "row-7"}, {"prompt": "h", "id": "row-99999999999"}]
    plan = planned(local_storage, accept(local_storage, jsonl(docs)))
    check(local_storage, plan)
    ids = {row.row_index: row.custom_id for row in rows_of(local_storage, plan)}
    ids |= {fault.row_index: fault.custom_id for fault in faults_of(local_storage, plan)}
    assert [ids[i] for i in range(9)] == [
        "row-0-3",
        "row-0",
        "row-0-2",
        "row-3-2",
        "row-3",
        "row-5",
        "row-6",
        "row-7",
        "row-99999999999",
    ]


def test_a_third_line_with_an_id_names_the_first(local_storage: Storage) -> None:
    plan = planned(
        local_storage, accept(local_storage, jsonl([{"prompt": str(i), "id": "x"} for i in range(3)]))
    )
    check(local_storage, plan)
    messages = [fault.error_message or "" for fault in faults_of(local_storage, plan)]
    assert [("line 2" in m, "line 3" in m, "line 1" in m) for m in messages] == [
        (True, False, True),
        (False, True, True),
    ]


def test_a_job_of_bad_lines_only_has_no_shard(local_storage: Storage) -> None:
    plan = planned(local_storage, accept(local_storage, b"{\n[]\nnull"))
    check(local_storage, plan)
    assert (plan["total"], plan["failed"], plan["shards"]) == (3, 3, [])


def test_many_faults_take_several_parts(local_storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "ERROR_ROWS_PER_PART", 10)
    plan = planned(local_storage, accept(local_storage, b"{\n" * 25))
    check(local_storage, plan)
    assert [part["rows"] for part in plan["error_parts"]] == [10, 10, 5]
    assert [part["shard"] for part in plan["error_parts"]] == [-1, -1, -1]


# --- refusals and stops ---


def refused(storage: Storage, spec: JobSpec) -> tuple[str, str]:
    plan = planned(storage, spec)
    assert (plan["total"], plan["failed"], plan["shards"], plan["error_parts"]) == (0, 0, [], [])
    assert planned(storage, spec, fence="0-9") == plan
    return plan["refused"]["code"], plan["refused"]["message"]


@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf\n"])
def test_a_file_without_lines_is_refused(local_storage: Storage, content: bytes) -> None:
    assert refused(local_storage, accept(local_storage, content))[0] == "empty_file"


def test_a_file_in_utf_16_is_refused(local_storage: Storage) -> None:
    code, message = refused(local_storage, accept(local_storage, '{"prompt": "a"}\n'.encode("utf-16")))
    assert code == "invalid_encoding"
    assert "UTF-8" in message


def test_compressed_data_that_were_cut_off_are_refused(local_storage: Storage) -> None:
    content = gzip.compress(jsonl({"prompt": str(i)} for i in range(5000)))
    code, message = refused(local_storage, accept(local_storage, content[:-20], ".gz"))
    assert (code, "middle" in message) == ("invalid_encoding", True)


def test_what_expands_too_far_is_refused(local_storage: Storage) -> None:
    content = gzip.compress(MIXED * 1000)
    code, message = refused(local_storage, accept(local_storage, content, ".gz", max_expanded_bytes=10_000))
    assert (code, "10,000 bytes" in message) == ("invalid_encoding", True)


def test_more_rows_than_allowed_are_refused_and_blank_lines_do_not_count(local_storage: Storage) -> None:
    content = b'\n{"prompt": "a"}\n\n{"prompt": "b"}\n\n'
    assert planned(local_storage, accept(local_storage, content, max_rows=2))["total"] == 2
    code, message = refused(local_storage, accept(local_storage, content, max_rows=1))
    assert (code, " 1 rows" in message) == ("too_many_rows", True)


def test_an_input_that_was_replaced_or_removed_is_refused(storage: Storage) -> None:
    spec = accept(storage, MIXED)
    storage.put(spec.input.key, MIXED + b'\n{"prompt": "later"}')
    assert refused(storage, spec)[0] == "input_changed"
    spec = accept(storage, MIXED)
    storage.delete([spec.input.key])
    assert refused(storage, spec)[0] == "input_changed"


class Replacing:
    """A store in which the input is replaced as soon as somebody reads it."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, key: str, *, if_match: str | None = None) -> Any:
        stream = self._inner.open(key, if_match=if_match)
        self._inner.put(key, b'{"prompt": "other"}')
        return stream


def test_an_input_that_changes_while_it_is_read_is_refused(local_storage: Storage) -> None:
    plan = planned(Replacing(local_storage), accept(local_storage, MIXED))  # type: ignore[arg-type]
    assert plan["refused"]["code"] == "input_changed"


def test_a_strict_job_with_a_bad_line_is_refused_before_anything_is_written(local_storage: Storage) -> None:
    spec = accept(local_storage, b'{"prompt": "a"}\n{"prompt": 5}\n{"prompt"', strict=True)
    code, message = refused(local_storage, spec)
    assert (code, "line 2" in message) == ("invalid_request", True)
    assert [info.key for info in local_storage.list(layout.shards(spec.job))] == []


def test_a_strict_job_with_a_repeated_id_is_refused(local_storage: Storage) -> None:
    content = jsonl([{"prompt": "a", "id": "x"}, {"prompt": "c"}, {"prompt": "b", "id": "x"}, {"prompt": 5}])
    code, message = refused(local_storage, accept(local_storage, content, strict=True))
    assert code == "duplicate_custom_id"
    assert 'the first of them: line 3: `custom_id` "x" was given before, on line 1' in message
    assert planned(local_storage, accept(local_storage, b'{"prompt": "a"}', strict=True))["total"] == 1


def test_a_job_stopped_before_its_plan_gets_an_empty_one(local_storage: Storage) -> None:
    plan = planned(local_storage, accept(local_storage, MIXED), stopped=lambda: "cancelled")
    assert plan["stopped"] == "cancelled"
    assert (plan["total"], plan["failed"], plan["errors"], plan["shards"], plan["error_parts"]) == (
        0,
        0,
        {},
        [],
        [],
    )


def test_a_stop_that_comes_while_everything_is_written_still_counts(local_storage: Storage) -> None:
    spec = accept(local_storage, MIXED)

    def stopped() -> str | None:
        return "expired" if any(True for _ in local_storage.list(layout.shards(spec.job))) else None

    assert planned(local_storage, spec, stopped=stopped)["stopped"] == "expired"


# --- storage that fails ---


class Damaging:
    """A store that changes some of what it is given."""

    def __init__(self, inner: Storage, times: int) -> None:
        self._inner = inner
        self._times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> Any:
        if "/shards/" in key and self._times > 0:
            self._times -= 1
            data = data[:-1]
        return self._inner.put(key, data, if_absent=if_absent)


def test_a_shard_damaged_on_its_way_is_sent_again(local_storage: Storage) -> None:
    plan = planned(Damaging(local_storage, 2), accept(local_storage, MIXED))  # type: ignore[arg-type]
    check(local_storage, plan)


def test_a_store_that_damages_everything_decides_nothing(local_storage: Storage) -> None:
    spec = accept(local_storage, MIXED)
    with pytest.raises(StorageError, match="damages"):
        planned(Damaging(local_storage, 99), spec)  # type: ignore[arg-type]
    assert local_storage.head(layout.plan(spec.job)) is None
    check(local_storage, planned(local_storage, spec, fence="0-2"))


def test_a_shard_damaged_in_the_store_is_not_run(local_storage: Storage) -> None:
    plan = planned(local_storage, accept(local_storage, MIXED))
    entry = plan["shards"][0]
    local_storage.put(entry["key"], local_storage.get(entry["key"])[:-1])
    with pytest.raises(StorageError, match="damaged"):
        read_shard(local_storage, entry)


def test_scratch_files_are_gone_afterwards(local_storage: Storage, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    planned(local_storage, accept(local_storage, MIXED), scratch=scratch)
    assert list(scratch.iterdir()) == []


def test_a_scratch_folder_that_cannot_be_used_is_one_sentence(local_storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = accept(local_storage, MIXED)
    with pytest.raises(StorageError, match="plan the job"):
        planned(local_storage, spec, scratch=tmp_path / "file")
    assert local_storage.head(layout.plan(spec.job)) is None


# --- larger than memory, and killed ---

CHILD = """
import sys
from pathlib import Path
from pagemill.jobs import plan
from pagemill.jobs.spec import JobSpec
from pagemill.jobs.storage import open_storage
spec = JobSpec.load(Path(sys.argv[2]).read_bytes())
plan.MEMORY = 1 << 20
plan.make_plan(open_storage(sys.argv[1]), spec, fence=sys.argv[3], fingerprint=None,
    stopped=lambda: print("asked", flush=True) or sys.stdin.read() or None, scratch=Path(sys.argv[4]))
"""


def test_a_planner_killed_at_any_moment_leaves_no_plan_or_a_whole_one(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "store")
    docs = ({"prompt": f"number {i}", "id": str(i)} for i in range(10_000))
    spec = accept(storage, jsonl(docs), shard_rows=50)
    (tmp_path / "job.json").write_bytes(spec.to_json())
    scratch = tmp_path / "scratch"
    kills = 0
    for attempt, shards_before in enumerate([0, 1, 100]):
        arguments = [str(tmp_path / "store"), str(tmp_path / "job.json"), f"0-{attempt}", str(scratch)]
        # The first one waits when it is asked, for ever: however fast the machine is, it has no plan yet.
        stdin = subprocess.DEVNULL if shards_before else subprocess.PIPE
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments], stdin=stdin, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()  # it is reading
        folder = tmp_path / "store" / layout.shards(spec.job) / f"0-{attempt}"
        while child.poll() is None and sum(1 for _ in folder.glob("*")) < shards_before:
            time.sleep(0.002)
        child.kill()
        child.wait()
        child.stdout.close()
        if child.stdin is not None:
            child.stdin.close()
        kills += storage.head(layout.plan(spec.job)) is None
    assert kills > 0
    plan = planned(storage, spec, fence="0-9", scratch=scratch)
    check(storage, plan)
    assert plan["total"] == 10_000
    # Each start sweeps what those before it left.
    assert len(list(scratch.iterdir())) <= (0 if plan["fence"] == "0-9" else 1)


def test_a_plan_larger_than_memory_is_the_same_plan(
    local_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(3)
    docs = [
        {"prompt": f"group {chance.randrange(40)} " * 20 + str(i), "id": str(chance.randrange(3000))}
        for i in range(3000)
    ]
    content = jsonl(docs)
    whole = planned(local_storage, accept(local_storage, content, shard_rows=100))
    monkeypatch.setattr(plan_module, "MEMORY", 100_000)
    pieces = planned(local_storage, accept(local_storage, content, shard_rows=100))
    check(local_storage, pieces)
    assert [entry["sha256"] for entry in pieces["shards"]] == [entry["sha256"] for entry in whole["shards"]]
    assert [part["sha256"] for part in pieces["error_parts"]] == [
        part["sha256"] for part in whole["error_parts"]
    ]
    assert whole["errors"]["duplicate_custom_id"] == 3000 - len({doc["id"] for doc in docs})


lines = st.one_of(
    st.builds(
        lambda p, i: json.dumps({"prompt": p, "id": f"row-{i}"}).encode(),
        st.text(max_size=5),
        st.integers(0, 9),
    ),
    st.builds(lambda p: json.dumps({"prompt": p}).encode(), st.text(max_size=5)),
    st.builds(lambda i: json.dumps({"prompt": "x", "id": f"row-{i}-2"}).encode(), st.integers(0, 5)),
    st.sampled_from([b"", b"  ", b"{", b"\xff", b"[]", b'{"prompt": NaN}']),
    st.binary(max_size=10),
)


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(st.lists(lines, max_size=14), st.integers(1, 6))
def test_any_lines_give_a_whole_plan(local_storage: Storage, content: list[bytes], shard_rows: int) -> None:
    data = b"{}\n" + b"\n".join(content)
    plan = planned(local_storage, accept(local_storage, data, shard_rows=shard_rows))
    check(local_storage, plan)
    assert plan["total"] == sum(1 for line in data.split(b"\n") if line.strip(b" \t\r"))
    assert all(entry["rows"] <= shard_rows for entry in plan["shards"])
