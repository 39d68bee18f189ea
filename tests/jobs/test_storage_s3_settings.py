"""An S3 store whose settings are wrong: each is said in a sentence, soon, and without a secret."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from faults.s3_proxy import FaultyS3, answer
from faulty_store import through

from pagemill.jobs.errors import DiskFull, ObjectNotFound, StorageError
from pagemill.jobs.storage import open_storage

if TYPE_CHECKING:
    from conftest import S3


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))


def wrong(s3: S3, **options: Any) -> str:
    url = options.pop("url", s3.url)
    with pytest.raises(StorageError) as caught:
        open_storage(url, replace(s3.options, **options)).check()
    said = str(caught.value)
    for secret in (s3.secret_key, "hunter2", "hunter3"):
        assert secret is not None
        assert secret not in said
    assert said.endswith(".")
    assert said[0].isupper() or said[0] == "'"
    return said


def test_an_unknown_access_key_is_said_in_a_sentence(s3: S3) -> None:
    assert "refused the credentials" in wrong(s3, access_key="hunter3", secret_key="hunter2")


def test_a_wrong_secret_is_said_in_a_sentence(s3: S3) -> None:
    said = wrong(s3, secret_key="hunter2")
    assert "refused the credentials" in said
    assert "AWS_SECRET_ACCESS_KEY" in said


def test_half_a_credential_is_said_in_a_sentence(s3: S3) -> None:
    assert "one half" in wrong(s3, secret_key=None)


@pytest.mark.usefixtures("no_credentials")
def test_no_credentials_are_said_in_a_sentence(s3: S3) -> None:
    assert "AWS_ACCESS_KEY_ID" in wrong(s3, access_key=None, secret_key=None)


@pytest.mark.usefixtures("no_credentials")
def test_an_unknown_profile_is_said_in_a_sentence(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert "AWS_PROFILE" in wrong(s3, access_key=None, secret_key=None)


@pytest.mark.usefixtures("no_credentials")
def test_the_usual_variables_give_the_credentials(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(s3.access_key))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", str(s3.secret_key))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", str(s3.endpoint))
    storage = open_storage(s3.url)
    storage.check()
    assert str(s3.secret_key) not in repr(storage)


def test_a_missing_bucket_is_said_in_a_sentence(s3: S3) -> None:
    said = wrong(s3, url="s3://no-such-bucket-here/x")
    assert "no bucket 'no-such-bucket-here'" in said
    assert "create it" in said
    storage = open_storage("s3://no-such-bucket-here", s3.options)
    with pytest.raises(StorageError, match="no bucket") as caught:
        storage.get("x")
    assert not isinstance(caught.value, ObjectNotFound)


def test_an_endpoint_where_nobody_is_is_said_in_a_sentence_and_soon(s3: S3) -> None:
    said = wrong(s3, endpoint="http://127.0.0.1:9")
    assert "Nobody answers at the S3 server at http://127.0.0.1:9" in said


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("localhost:9000", "write http://localhost:9000"),
        ("minio", "write http://minio"),
        ("ftp://minio", "no http:// or https:// address"),
        ("http://", "no http:// or https:// address"),
        ("http://key:hunter2@minio", "holds credentials"),
        ("key:hunter2@minio", "holds credentials"),
    ],
)
def test_an_endpoint_that_cannot_be_one_is_said_in_a_sentence(s3: S3, endpoint: str, says: str) -> None:
    assert says in wrong(s3, endpoint=endpoint)


def test_tls_where_there_is_none_is_said_in_a_sentence(s3: S3) -> None:
    assert "does not speak TLS" in wrong(s3, endpoint=str(s3.endpoint).replace("http:", "https:"))


@contextmanager
def something_else(reply: bytes) -> Iterator[str]:
    """The address of a server that knows no S3, and gives this answer to whatever comes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer_all() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return  # the test is over
                with connection:
                    connection.recv(65536)
                    connection.sendall(reply)

        thread = threading.Thread(target=answer_all, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", "without an ETag"),
        (
            b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi",
            "status 404 and no code",
        ),
        (
            b"HTTP/1.1 405 Not Allowed\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
            "status 405 and no code",
        ),
        (b"-ERR unknown command\r\n", "broke off"),
    ],
)
def test_a_server_that_is_no_s3_server_is_said_in_a_sentence_and_soon(
    s3: S3, reply: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("pagemill.jobs.storage_s3_requests.time.sleep", slept.append)
    with something_else(reply) as endpoint:
        said = wrong(s3, endpoint=endpoint)
    assert says in said
    assert "check" in said
    assert "PAGEMILL_S3_ENDPOINT" in said
    assert sum(slept) < 1.0


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (403, "AccessDenied", "denied access"),
        (403, "RequestTimeTooSkewed", "set the clock right"),
        (301, "PermanentRedirect", "PAGEMILL_S3_REGION"),
        (507, "XMinioStorageFull", "is full"),
        (400, "EntityTooLarge", "EntityTooLarge, status 400; look the code up"),
    ],
)
def test_what_a_server_answers_is_said_in_a_sentence(
    faulty: FaultyS3, s3: S3, status: int, code: str, says: str
) -> None:
    faulty.rule("PUT", "", answer(status, code))
    with pytest.raises(StorageError, match=says) as caught:
        through(faulty, s3).put("x", b"")
    assert not caught.value.transient
    assert isinstance(caught.value, DiskFull) == (status == 507)
    assert len(faulty.requests("PUT")) == 1 or status == 301


def test_the_region_is_the_one_that_was_given(faulty: FaultyS3, s3: S3) -> None:
    through(faulty, s3, region="eu-x").put("x", b"")
    assert "/eu-x/s3/aws4_request" in faulty.seen[0].headers["Authorization"]


def test_a_server_in_another_region_is_said_in_a_sentence(faulty: FaultyS3, s3: S3) -> None:
    faulty.rule("PUT", "", answer(400, "AuthorizationHeaderMalformed", Region="eu-x"))
    with pytest.raises(StorageError, match="it is in 'eu-x'; set PAGEMILL_S3_REGION"):
        through(faulty, s3).put("x", b"")


def test_the_bucket_stands_in_the_path_for_a_custom_endpoint(faulty: FaultyS3, s3: S3) -> None:
    through(faulty, s3).put("x", b"")
    assert faulty.seen[0].path == f"/{s3.bucket}/{s3.prefix}/x"
