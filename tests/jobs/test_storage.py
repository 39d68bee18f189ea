"""What both kinds of store promise, each test over both; then what is a folder's alone."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagemill.jobs.errors import DiskFull, ObjectNotFound, PreconditionFailed, StorageError
from pagemill.jobs.storage import (
    Storage,
    StorageOptions,
    check_key,
    decide,
    encode_json,
    open_storage,
    read_json,
)


def keys(storage: Storage, prefix: str = "") -> list[str]:
    return [info.key for info in storage.list(prefix)]


def test_what_is_put_is_got(storage: Storage) -> None:
    info = storage.put("jobs/a/x.json", b"one")
    assert (info.key, info.size) == ("jobs/a/x.json", 3)
    assert storage.get("jobs/a/x.json") == b"one"
    found = storage.head("jobs/a/x.json")
    assert found is not None
    assert (found.key, found.size, found.etag) == (info.key, 3, info.etag)
    assert abs(found.modified - time.time()) < 60


def test_a_second_put_replaces_the_whole_object(storage: Storage) -> None:
    first = storage.put("x", b"a long first value")
    second = storage.put("x", b"short")
    assert storage.get("x") == b"short"
    assert first.etag != second.etag


def test_an_empty_object_is_an_object(storage: Storage) -> None:
    storage.put("_SUCCESS", b"")
    assert storage.get("_SUCCESS") == b""
    assert storage.put_stream("none", iter(())).size == 0


def test_a_missing_object_is_said_to_be_missing(storage: Storage) -> None:
    assert storage.head("a/b") is None
    assert read_json(storage, "a/b") is None
    for read in (storage.get, storage.open):
        with pytest.raises(ObjectNotFound, match="a/b"):
            read("a/b")
    with pytest.raises(ObjectNotFound), storage.as_file("a/b"):
        pass


def test_a_name_with_odd_characters_is_kept(storage: Storage) -> None:
    key = "jobs/a b/ü+%20&=€ #?.json"
    storage.put(key, b"x")
    assert storage.get(key) == b"x"
    assert keys(storage, "jobs/") == [key]


def test_put_if_absent_is_refused_where_something_is(storage: Storage, tmp_path: Path) -> None:
    storage.put("x", b"first", if_absent=True)
    with pytest.raises(PreconditionFailed, match="x"):
        storage.put("x", b"second", if_absent=True)
    path = tmp_path / "file"
    path.write_bytes(b"third")
    with pytest.raises(PreconditionFailed):
        storage.put_file("x", path, if_absent=True)
    assert storage.get("x") == b"first"


def test_of_many_who_put_if_absent_one_wins(storage: Storage) -> None:
    barrier = threading.Barrier(8)

    def put(number: int) -> bool:
        barrier.wait()
        try:
            storage.put("decision", str(number).encode(), if_absent=True)
        except PreconditionFailed:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(put, range(8)))
    assert won.count(True) == 1
    assert storage.get("decision") == str(won.index(True)).encode()


def test_a_changed_object_is_not_read_under_its_old_etag(storage: Storage) -> None:
    old = storage.put("input", b"one")
    with storage.open("input", if_match=old.etag) as stream:
        assert stream.read() == b"one"
    storage.put("input", b"two")
    with pytest.raises(PreconditionFailed):
        storage.open("input", if_match=old.etag)


def test_a_stream_is_read_in_pieces_and_lines(storage: Storage) -> None:
    data = b"".join(b"%d\n" % i for i in range(300_000))
    storage.put("lines", data)
    with storage.open("lines") as stream:
        assert stream.read(3) == b"0\n1"
        assert stream.readline() == b"\n"
        assert stream.read() == data[4:]
        assert stream.read(1) == b""


def test_chunks_of_any_size_make_one_object(storage: Storage) -> None:
    chunks = [b"a" * size for size in (0, 1, 70_000, 0, 3)]
    assert storage.put_stream("x", iter(chunks)).size == 70_004
    assert storage.get("x") == b"".join(chunks)


def test_an_error_in_the_middle_of_a_stream_leaves_no_object(storage: Storage) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x" * 100_000
        raise RuntimeError("the line broke")

    with pytest.raises(RuntimeError, match="the line broke"):
        storage.put_stream("x", chunks())
    assert keys(storage) == []


def test_a_file_is_put_and_fetched(storage: Storage, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(300_000))
    assert storage.put_file("a/part.parquet", path).size == 300_000
    with storage.as_file("a/part.parquet") as fetched:
        assert fetched.read_bytes() == path.read_bytes()
    assert storage.get("a/part.parquet") == path.read_bytes()
    with pytest.raises(StorageError, match="nothing-here"):
        storage.put_file("b", tmp_path / "nothing-here")


def test_listing_goes_by_prefix(storage: Storage) -> None:
    names = ["a/b/1", "a/b/2", "a/b-c", "a/b0", "a/bb/1", "b", "é"]
    for name in names:
        storage.put(name, b"x")
    assert sorted(keys(storage)) == sorted(names)
    assert sorted(keys(storage, "a/b/")) == ["a/b/1", "a/b/2"]
    assert sorted(keys(storage, "a/b")) == ["a/b-c", "a/b/1", "a/b/2", "a/b0", "a/bb/1"]
    assert keys(storage, "a/b/1") == ["a/b/1"]
    assert keys(storage, "c/") == []


def test_folders_are_names_up_to_the_next_slash(storage: Storage) -> None:
    for name in ("jobs/b/x", "jobs/a/x/y", "jobs/file", "other/c/x"):
        storage.put(name, b"")
    assert list(storage.folders("jobs/")) == ["a", "b"]
    assert list(storage.folders("")) == ["jobs", "other"]
    assert list(storage.folders("none/")) == []


def test_deleting_is_idempotent(storage: Storage) -> None:
    for name in ("a/1", "a/2", "b"):
        storage.put(name, b"")
    storage.delete(["a/1", "a/2", "never/there"])
    storage.delete(iter(["a/1"]))
    assert keys(storage) == ["b"]
    storage.put("a/1", b"again", if_absent=True)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a//b",
        "a/",
        "./a",
        "a/.",
        "a\\..\\b",
        "a\0b",
        "a\nb",
        "x" * 256,
    ],
)
def test_no_key_leads_out_of_the_store(storage: Storage, key: str) -> None:
    for use in (storage.get, storage.head, lambda key: storage.put(key, b"")):
        with pytest.raises(StorageError, match="cannot be the key"):
            use(key)
    with pytest.raises(StorageError, match="cannot be the key"):
        storage.delete([key])


def test_a_check_passes_and_leaves_nothing(storage: Storage) -> None:
    storage.check()
    assert keys(storage) == []


def test_the_url_leads_back(storage: Storage) -> None:
    storage.put("x", b"1")
    assert storage.url in repr(storage)
    if storage.url.startswith("file:"):
        assert open_storage(storage.url).get("x") == b"1"


def test_the_first_decision_counts_for_everybody(storage: Storage) -> None:
    assert decide(storage, "plan.json", {"by": 1, "at": 0.1}) == ({"by": 1, "at": 0.1}, True)
    assert decide(storage, "plan.json", {"by": 2}) == ({"by": 1, "at": 0.1}, False)


def test_our_own_decision_met_again_is_ours(storage: Storage) -> None:
    document = {"b": "ü", "a": [1.5, None], "shards": [{"n": 1}]}
    decide(storage, "plan.json", document)
    found, ours = decide(storage, "plan.json", dict(reversed(document.items())))
    assert ours
    assert found == document


def test_a_damaged_document_is_not_taken_for_none(storage: Storage) -> None:
    for data in (b"", b'{"cut', b"[1]"):
        storage.put("plan.json", data)
        with pytest.raises(StorageError, match=r"plan\.json"):
            read_json(storage, "plan.json")


def test_equal_documents_are_equal_bytes() -> None:
    assert encode_json({"a": 1, "b": {"d": 1, "c": 2}}) == encode_json({"b": {"c": 2, "d": 1}, "a": 1})


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs://bucket/x", "gs://"),
        ("s3://", "no bucket"),
        ("s3://key:hunter2@bucket", "credentials"),
        ("file://host/x", "three slashes"),
        ("", "no usable name"),
        ("s3://localhost:9000/bucket", "PAGEMILL_S3_ENDPOINT"),
        ("s3://bucket/a/../b", "cannot be the key"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused_in_a_sentence(url: str, says: str) -> None:
    with pytest.raises(StorageError, match=says) as caught:
        open_storage(url)
    assert "hunter2" not in str(caught.value)


def test_a_folder_is_named_by_path_or_url(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    open_storage(folder).put("x", b"1")
    assert open_storage(folder.as_uri()).get("x") == b"1"
    assert open_storage(str(folder)).url == folder.as_uri()


def test_options_come_from_the_environment_where_they_are_unset() -> None:
    env = {
        "PAGEMILL_S3_ENDPOINT": "http://a:1",
        "AWS_ENDPOINT_URL": "http://b:1",
        "AWS_REGION": "eu-x",
        "PAGEMILL_S3_PATH_STYLE": "0",
        "PAGEMILL_S3_CHECKSUMS": "when_supported",
        "PAGEMILL_S3_ACCEPT_NO_CONDITIONAL_WRITES": "yes",
    }
    filled = StorageOptions().filled(env)
    assert (filled.endpoint, filled.region, filled.path_style) == ("http://a:1", "eu-x", False)
    assert (filled.checksums, filled.accept_no_conditional_writes) == ("when_supported", True)
    assert StorageOptions(endpoint="http://c", region="r").filled(env).endpoint == "http://c"
    assert StorageOptions().filled({}) == StorageOptions()
    for name in ("PAGEMILL_S3_PATH_STYLE", "PAGEMILL_S3_CHECKSUMS"):
        with pytest.raises(StorageError, match=name):
            StorageOptions().filled({name: "perhaps"})


def test_secrets_are_in_no_repr() -> None:
    shown = repr(StorageOptions(access_key="AKIA123", secret_key="hunter2"))
    assert "AKIA123" not in shown
    assert "hunter2" not in shown


# A folder


KILLED_WRITER = """
import sys
from pagemill.jobs.storage import open_storage
def chunks():
    yield b"x" * 3_000_000
    print("half", flush=True)
    sys.stdin.read()
    yield b"y"
open_storage(sys.argv[1]).put_stream("jobs/a/part", chunks())
"""


def test_a_writer_killed_in_the_middle_leaves_no_object(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_WRITER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        writer.kill()
    leftovers = list((tmp_path / ".pagemill-tmp").iterdir())
    assert sum(path.stat().st_size for path in leftovers) >= 2_000_000
    assert keys(storage) == []
    assert storage.head("jobs/a/part") is None
    assert list(storage.folders("")) == []

    storage.check()
    assert len(list((tmp_path / ".pagemill-tmp").iterdir())) == 1, "it may belong to somebody alive"
    os.utime(leftovers[0], (time.time() - 2 * 86400,) * 2)
    storage.check()
    assert list((tmp_path / ".pagemill-tmp").iterdir()) == []


def test_the_temporary_folder_is_no_place_for_objects(local_storage: Storage) -> None:
    with pytest.raises(StorageError, match="cannot be the key"):
        local_storage.put(".pagemill-tmp/x", b"")
    assert check_key("a/.pagemill-tmp")


def test_a_full_disk_is_said_in_a_sentence(local_storage: Storage) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DiskFull, match="disk is full; free some space"):
        local_storage.put_stream("a/x", chunks())
    assert keys(local_storage) == []


def test_a_file_in_the_place_of_the_folder_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a file is where a folder should be"):
        open_storage(tmp_path / "file").check()
    storage = open_storage(tmp_path)
    with pytest.raises(StorageError, match="a file is where a folder should be"):
        storage.put("file/x", b"")
    assert storage.head("file/x") is None
    with pytest.raises(ObjectNotFound):
        storage.get("file/x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_said_in_a_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="no permission"):
        open_storage(tmp_path / "store").check()


def test_reading_makes_no_folder(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "store")
    assert storage.head("x") is None
    assert keys(storage) == []
    assert not (tmp_path / "store").exists()


def test_a_store_of_many_writers_and_sweepers_loses_nothing(local_storage: Storage) -> None:
    """A folder that a delete leaves empty is removed, while somebody else is about to put something there."""

    def put_and_delete(number: int) -> None:
        for i in range(60):
            key = f"work/{i % 3}/{number}"
            local_storage.put(key, b"x", if_absent=True)
            assert local_storage.get(key) == b"x"
            local_storage.delete([key])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put_and_delete, range(4)))
    assert keys(local_storage) == []
