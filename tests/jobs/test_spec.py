import json
import re
from typing import Any

import pytest

from pagemill.jobs.errors import PagemillError, ProtocolMismatch, UsageError
from pagemill.jobs.spec import InputRef, JobSpec, check_defaults, check_job_id, default_seed, new_job_id


def spec(**fields: Any) -> JobSpec:
    source = InputRef(key="jobs/j/input.jsonl", size=10, etag="e", name="in.jsonl")
    return JobSpec(**{"job": "j", "model": "m", "created_at": 1.5, "input": source, "seed": 7, **fields})


def test_a_job_is_written_and_read_back() -> None:
    job = spec(defaults={"max_tokens": 5}, expires_at=9.0, max_shards=2, context=4096)
    assert JobSpec.load(job.to_json()) == job
    assert JobSpec.load(json.dumps(job.model_dump(mode="json"))) == job


def test_defaults_are_checked_like_a_rows_parameters() -> None:
    assert spec(defaults={"max_completion_tokens": 5, "temperature": 0}).defaults == {
        "max_tokens": 5,
        "temperature": 0.0,
    }
    assert check_defaults(None) == {}
    for raw in ({"temperature": 3}, {"tools": [1]}, {"prompt": "a"}, [1]):
        with pytest.raises(UsageError, match="the job's defaults"):
            check_defaults(raw)
    with pytest.raises(UsageError, match="`tools`"):
        spec(defaults={"tools": [1]})


def test_a_default_that_switches_logprobs_off_survives_being_read_back() -> None:
    job = spec(defaults={"logprobs": False})
    assert JobSpec.load(job.to_json()).digest() == job.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"job": "k"},
        {"created_at": 2.0},
        {"priority": 5},
        {"max_shards": 1},
        {"expires_at": 99.0},
        {"retention_s": 5},
        {"idempotency_key": "x"},
        {"shard_tokens": 5},
        {"shard_rows": 5},
        {"input": InputRef(key="elsewhere", size=10, etag="e", name="other.jsonl")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_digest_ignores_what_changes_no_row(change: dict[str, Any]) -> None:
    assert spec(**change).digest() == spec().digest()


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"seed": 8},
        {"defaults": {"max_tokens": 5}},
        {"context": 5},
        {"strict": True},
        {"special_tokens_in_content": "parse"},
        {"model_policy": "match"},
        {"max_rows": 5},
        {"max_line_bytes": 5},
        {"max_expanded_bytes": 5},
        {"input": InputRef(key="k", size=11, etag="e")},
        {"input": InputRef(key="k", size=10, etag="f")},
        {"input": InputRef(key="k", size=10, etag="e", suffix=".gz")},
        {"input": InputRef(key="k", size=10, etag="e", sha256="00")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_digest_sees_what_changes_a_row(change: dict[str, Any]) -> None:
    assert spec(**change).digest() != spec().digest()


def test_every_field_is_known_to_matter_or_not() -> None:
    covered = {
        "job",
        "created_at",
        "priority",
        "max_shards",
        "expires_at",
        "retention_s",
        "idempotency_key",
        "retry_of",
        "shard_tokens",
        "shard_rows",
        "input",
        "model",
        "seed",
        "defaults",
        "context",
        "strict",
        "special_tokens_in_content",
        "model_policy",
        "max_rows",
        "max_line_bytes",
        "max_expanded_bytes",
        "protocol",
    }
    assert set(JobSpec.model_fields) == covered


def test_one_file_uploaded_twice_is_one_input_where_its_hash_is_known() -> None:
    first, again = (InputRef(key="k", size=10, etag=etag, sha256="ab") for etag in ("one", "two"))
    assert spec(input=first).digest() == spec(input=again).digest()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"not json", PagemillError),
        (b"[]", PagemillError),
        (b"{}", ProtocolMismatch),
        (json.dumps({"protocol": 2, "new": 1}).encode(), ProtocolMismatch),
        (json.dumps({"protocol": 1}).encode(), PagemillError),
        (spec().to_json().replace(b'"seed":', b'"seeed":'), PagemillError),
    ],
)
def test_a_document_that_is_no_job_is_one_sentence(data: bytes, error: type[PagemillError]) -> None:
    with pytest.raises(error) as raised:
        JobSpec.load(data)
    assert "\n" not in str(raised.value)


def test_job_ids_sort_by_time_and_do_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {new_job_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch(r"job-[0-9a-z]{20}", check_job_id(job)) for job in ids)
    times = [1_700_000_000_000_000_000, 1_700_000_000_001_000_000, 4_000_000_000_000_000_000]
    in_order = []
    for now in times:
        monkeypatch.setattr("pagemill.jobs.spec.time.time_ns", lambda now=now: now)
        in_order.append(new_job_id())
    assert in_order == sorted(in_order)


@pytest.mark.parametrize("text", ["a", "A.b-c_9", "0", "x" * 128])
def test_an_id_may_be_chosen(text: str) -> None:
    assert check_job_id(text) == text


@pytest.mark.parametrize(
    "text", ["", "a/b", "..", "a..b", ".", ".a", "-a", "a b", "ä", "a\n", "x" * 129, "{a}", "a:b"]
)
def test_an_id_that_could_leave_its_place_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a job id"):
        check_job_id(text)
    with pytest.raises(UsageError):
        spec(job=text)


def test_a_job_without_a_seed_gets_one_from_its_id() -> None:
    assert default_seed("a") == default_seed("a") != default_seed("b")
    assert 0 <= default_seed("a") < 2**63
