"""An S3 store when things go wrong: lost replies, damaged bytes, servers that know less than Amazon's."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from faults.s3_proxy import (
    FaultyS3,
    answer,
    cut_body,
    damage_reply,
    damage_request,
    drop_reply,
    drop_request,
)
from faulty_store import PART, QUICK, through

from pagemill.jobs.errors import PreconditionFailed, StorageError
from pagemill.jobs.storage import StorageOptions, decide, open_storage
from pagemill.jobs.storage_s3 import READS, S3Storage

if TYPE_CHECKING:
    from conftest import S3


def file_of(tmp_path: Path, size: int) -> tuple[Path, str]:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(size))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def digest(storage: S3Storage, key: str) -> str:
    return hashlib.sha256(storage.get(key)).hexdigest()


# Replies that get lost, and servers that are away for a moment


def test_a_decision_whose_reply_was_lost_is_ours(faulty: FaultyS3, s3: S3) -> None:
    faulty.rule("PUT", "plan.json", drop_reply, times=1)
    assert decide(through(faulty, s3), "plan.json", {"by": "us"}) == ({"by": "us"}, True)
    assert len(faulty.requests("PUT")) == 2


def test_put_if_absent_knows_the_echo_of_its_own_write(faulty: FaultyS3, s3: S3) -> None:
    storage = through(faulty, s3)
    faulty.rule("PUT", "/x", drop_reply, times=1)
    storage.put("x", b"same", if_absent=True)
    with pytest.raises(PreconditionFailed):
        storage.put("x", b"same", if_absent=True)  # the same bytes, and yet another write
    assert storage.get("x") == b"same"


def test_a_lost_reply_does_not_make_another_s_decision_ours(faulty: FaultyS3, s3: S3) -> None:
    storage = through(faulty, s3)
    decide(open_storage(s3.url, s3.options), "plan.json", {"by": "them"})
    faulty.rule("PUT", "plan.json", drop_reply, times=1)
    assert decide(storage, "plan.json", {"by": "us"}) == ({"by": "them"}, False)


@pytest.mark.parametrize("if_absent", [False, True])
def test_an_upload_whose_completion_s_reply_was_lost_is_complete(
    faulty: FaultyS3, s3: S3, tmp_path: Path, if_absent: bool
) -> None:
    path, expected = file_of(tmp_path, 2 * PART + 1000)
    storage = through(faulty, s3)
    faulty.rule("POST", "uploadId=", drop_reply, times=1)
    info = storage.put_file("x", path, if_absent=if_absent)
    assert digest(storage, "x") == expected
    head = storage.head("x")
    assert head is not None
    assert head.etag == info.etag


def test_an_upload_that_the_server_forgot_is_made_again(faulty: FaultyS3, s3: S3, tmp_path: Path) -> None:
    path, expected = file_of(tmp_path, 2 * PART + 1000)
    storage = through(faulty, s3)
    faulty.rule("POST", "uploadId=", answer(404, "NoSuchUpload"), times=1)
    storage.put_file("x", path)
    assert digest(storage, "x") == expected
    assert len(faulty.requests("POST", "?uploads")) == 2


def test_an_upload_that_loses_the_race_is_refused_and_taken_back(
    faulty: FaultyS3, s3: S3, tmp_path: Path
) -> None:
    path, _ = file_of(tmp_path, 2 * PART + 1000)
    storage = through(faulty, s3)

    def somebody_is_first(exchange: Any) -> None:
        open_storage(s3.url, s3.options).put("x", b"theirs")
        exchange.reply(*exchange.forward())

    faulty.rule("POST", "uploadId=", somebody_is_first, times=1)
    with pytest.raises(PreconditionFailed):
        storage.put_file("x", path, if_absent=True)
    assert storage.get("x") == b"theirs"
    assert len(faulty.requests("DELETE", "uploadId=")) == 1


@pytest.mark.parametrize(
    "fault",
    [
        answer(503, "SlowDown"),
        answer(500, "InternalError"),
        answer(502),
        answer(429, "TooManyRequests"),
        answer(409, "ConditionalRequestConflict"),
        drop_request,
    ],
)
def test_a_fault_that_passes_is_waited_out(faulty: FaultyS3, s3: S3, fault: Any) -> None:
    for method in ("PUT", "GET", "HEAD", "DELETE"):
        faulty.rule(method, "", fault, times=2)
    storage = through(faulty, s3)
    storage.put("x", b"1", if_absent=True)
    assert storage.get("x") == b"1"
    assert storage.head("x") is not None
    storage.delete(["x"])
    assert list(storage.list("")) == []


def test_a_fault_that_stays_is_transient(faulty: FaultyS3, s3: S3) -> None:
    faulty.rule("PUT", "", answer(503, "SlowDown"))
    with pytest.raises(StorageError, match="SlowDown, status 503") as caught:
        through(faulty, s3).put("x", b"1")
    assert caught.value.transient
    assert len(faulty.requests("PUT")) == len(QUICK) + 1


def test_bytes_that_change_on_the_way_are_sent_again(faulty: FaultyS3, s3: S3) -> None:
    def damage(exchange: Any) -> None:
        exchange.body = b"X" + exchange.body[1:]
        exchange.headers.pop("x-amz-content-sha256", None)
        exchange.reply(400, [], b"<Error><Code>BadDigest</Code></Error>")

    faulty.rule("PUT", "", damage, times=1)
    storage = through(faulty, s3)
    storage.put("x", b"precious")
    assert storage.get("x") == b"precious"
    sent = faulty.requests("PUT")[0].headers
    assert sent["Content-MD5"]


def test_a_read_that_breaks_off_goes_on_where_it_was(faulty: FaultyS3, s3: S3) -> None:
    data = os.urandom(4 << 20)
    storage = through(faulty, s3)
    storage.put("x", data)
    faulty.rule("GET", "/x", cut_body(1_500_000), times=2)
    with storage.open("x") as stream:
        assert stream.read() == data
    ranges = [e.headers.get("Range") for e in faulty.requests("GET", "/x")]
    assert ranges[0] is None
    assert all(str(r).startswith("bytes=") for r in ranges[1:])
    assert all(e.headers["If-Match"] for e in faulty.requests("GET", "/x")[1:])


def test_a_read_does_not_go_on_in_another_object(faulty: FaultyS3, s3: S3) -> None:
    storage = through(faulty, s3)
    storage.put("x", os.urandom(4 << 20))
    faulty.rule("GET", "/x", cut_body(1_500_000), times=1)
    with storage.open("x") as stream:
        stream.read(10)
        open_storage(s3.url, s3.options).put("x", os.urandom(4 << 20))
        with pytest.raises(PreconditionFailed):
            stream.read()


def test_a_read_that_keeps_breaking_off_ends(faulty: FaultyS3, s3: S3) -> None:
    storage = through(faulty, s3)
    storage.put("x", b"0123456789")
    faulty.rule("GET", "/x", cut_body(0))
    with storage.open("x") as stream, pytest.raises(StorageError, match="breaking off") as caught:
        stream.read()
    assert caught.value.transient


def test_if_match_holds_on_a_server_that_ignores_it(faulty: FaultyS3, s3: S3) -> None:
    storage = through(faulty, s3)
    old = storage.put("x", b"one")
    storage.put("x", b"two")

    def ignores(exchange: Any) -> None:
        without = open_storage(s3.url, s3.options)
        body = without.get("x")
        exchange.reply(200, [("ETag", '"other"')], body)

    faulty.rule("GET", "/x", ignores)
    with pytest.raises(PreconditionFailed):
        storage.open("x", if_match=old.etag)


# Bytes that are not those that were written


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_a_small_object_that_arrives_damaged_is_read_again(faulty: FaultyS3, s3: S3, at: float) -> None:
    storage = through(faulty, s3)
    storage.put("x", b'{"rows": 1000}')
    faulty.rule("GET", "/x", damage_reply(at), times=READS - 1)
    assert storage.get("x") == b'{"rows": 1000}'
    faulty.rule("GET", "/x", damage_reply(at), times=READS - 1)
    with storage.as_file("x") as path:
        assert path.read_bytes() == b'{"rows": 1000}'


def test_an_object_that_keeps_arriving_damaged_is_an_error_that_passes(faulty: FaultyS3, s3: S3) -> None:
    storage = through(faulty, s3)
    storage.put("x", os.urandom(3 << 20))
    faulty.rule("GET", "/x", damage_reply(0.9))
    for read in (lambda: storage.get("x"), lambda: storage.open("x").read()):
        with pytest.raises(StorageError, match="arrived damaged") as caught:
            read()
        assert caught.value.transient


def test_damage_is_found_out_also_where_a_read_broke_off_and_went_on(faulty: FaultyS3, s3: S3) -> None:
    data = os.urandom(3 << 20)
    storage = through(faulty, s3)
    storage.put("x", data)
    faulty.rule("GET", "/x", cut_body(1_500_000), times=1)
    faulty.rule("GET", "/x", damage_reply(0.5), times=1)
    assert storage.get("x") == data
    assert len(faulty.requests("GET", "/x")) == 3


def test_what_is_damaged_on_its_way_to_the_server_is_not_taken(
    faulty: FaultyS3, s3: S3, tmp_path: Path
) -> None:
    storage = through(faulty, s3)
    path, expected = file_of(tmp_path, 2 * PART + 1000)
    faulty.rule("PUT", "", damage_request(0.5), times=2)
    storage.put("x", b"precious", if_absent=True)
    assert storage.get("x") == b"precious"
    faulty.rule("PUT", "", damage_request(0.5), times=2)
    storage.put_file("large", path)
    assert digest(storage, "large") == expected


# Servers that know less


def test_all_parts_of_an_upload_but_the_last_have_one_size(faulty: FaultyS3, s3: S3, tmp_path: Path) -> None:
    storage = through(faulty, s3)
    path, expected = file_of(tmp_path, 3 * PART + 17)
    storage.put_file("file", path)
    storage.put_stream("stream", iter([path.read_bytes()[:7], path.read_bytes()[7:]]))
    for key in ("file", "stream"):
        sizes = [len(e.body) for e in faulty.requests("PUT", f"/{key}?")]
        assert sizes == [PART, PART, PART, 17]
        assert digest(storage, key) == expected


def test_no_newer_checksum_is_sent_to_or_asked_of_a_custom_endpoint(
    faulty: FaultyS3, s3: S3, tmp_path: Path
) -> None:
    storage = through(faulty, s3)
    path, _ = file_of(tmp_path, 2 * PART + 1)
    storage.check()
    storage.put_file("large", path)
    storage.put("x", b"1")
    storage.get("x")
    storage.delete(["x", "large"])
    for exchange in faulty.seen:
        names = {name.lower() for name in exchange.headers}
        assert not {n for n in names if "checksum" in n or n in ("x-amz-trailer", "content-encoding")}
        assert "STREAMING" not in exchange.headers.get("x-amz-content-sha256", "")


def test_newer_checksums_can_be_had(faulty: FaultyS3, s3: S3, tmp_path: Path) -> None:
    storage = through(faulty, s3, checksums="when_supported")
    path, expected = file_of(tmp_path, 2 * PART + 1)
    storage.put_file("large", path)
    assert digest(storage, "large") == expected
    assert faulty.requests("POST", "?uploads")[0].headers["x-amz-checksum-algorithm"] == "CRC32"
    assert faulty.requests("POST", "uploadId=")[0].body.count(b"<ChecksumCRC32>") == 3
    storage.put("x", b"1")
    assert storage.get("x") == b"1"
    assert faulty.requests("GET")[0].headers["x-amz-checksum-mode"] == "ENABLED"


def ignores_conditions(faulty: FaultyS3) -> None:
    def overwrite(exchange: Any) -> None:
        exchange.reply(200, [("ETag", '"x"')], b"")

    faulty.rule("PUT", "", overwrite)


def test_a_server_that_ignores_conditions_is_found_out_and_refused(faulty: FaultyS3, s3: S3) -> None:
    ignores_conditions(faulty)
    with pytest.raises(
        StorageError, match=r"no conditional writes.*ACCEPT_NO_CONDITIONAL_WRITES=1"
    ) as caught:
        through(faulty, s3).check()
    assert not caught.value.transient


def test_a_server_that_refuses_conditions_is_refused(faulty: FaultyS3, s3: S3) -> None:
    faulty.rule("PUT", "", answer(501, "NotImplemented"))
    storage = through(faulty, s3)
    for use in (storage.check, lambda: storage.put("x", b"1", if_absent=True)):
        with pytest.raises(StorageError, match="no conditional writes"):
            use()


def test_a_server_without_conditions_can_be_accepted(faulty: FaultyS3, s3: S3) -> None:
    def refuses(exchange: Any) -> None:
        if "If-None-Match" in exchange.headers:
            answer(501, "NotImplemented")(exchange)
        else:
            exchange.reply(*exchange.forward())

    faulty.rule("PUT", "", refuses)
    storage = through(faulty, s3, accept_no_conditional_writes=True)
    storage.check()
    storage.put("x", b"first", if_absent=True)
    with pytest.raises(PreconditionFailed):
        storage.put("x", b"second", if_absent=True)
    assert storage.get("x") == b"first"


def test_many_objects_are_listed_page_by_page(s3: S3) -> None:
    storage = S3Storage(s3.bucket, s3.prefix, s3.options)
    pages: list[int] = []
    original = storage._requests.call

    def small_pages(action: str, operation: str, *args: Any, **parameters: Any) -> dict[str, Any]:
        if operation == "list_objects_v2":
            parameters["MaxKeys"] = 3
            pages.append(1)
        return original(action, operation, *args, **parameters)

    storage._requests.call = small_pages  # type: ignore[method-assign]
    for i in range(8):
        storage.put(f"a/{i}", b"")
    assert sorted(i.key for i in storage.list("a/")) == [f"a/{i}" for i in range(8)]
    assert len(pages) >= 3


def test_options_of_a_region_reach_amazon_s_own_addresses() -> None:
    storage = S3Storage("bucket", "", StorageOptions(region="eu-central-1", access_key="a", secret_key="b"))
    assert storage._requests._client.meta.endpoint_url == "https://s3.eu-central-1.amazonaws.com"
    assert storage._requests._client.meta.config.request_checksum_calculation == "when_supported"
