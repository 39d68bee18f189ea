"""An S3-compatible store through boto3: the same interface as a directory, over a prefix in a bucket."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, cast

from pagemill.jobs.errors import ObjectNotFound, PreconditionFailed
from pagemill.jobs.scratch import scratch_folder
from pagemill.jobs.storage import (
    CHUNK_BYTES,
    ObjectInfo,
    Storage,
    StorageOptions,
    check_key,
    check_prefix,
    scratch_faults,
)
from pagemill.jobs.storage_s3_read import Damaged, ObjectReader
from pagemill.jobs.storage_s3_requests import RETRY_DELAYS, Requests
from pagemill.jobs.storage_s3_write import DIGEST, Writer, pieces

PART_BYTES: Final = 32 << 20
"""What larger objects are cut into on upload: 312 GiB at most for a stream, and two parts in memory."""

READS: Final = 3
"""How often an object is read that arrives damaged, before its reader is told."""

T = TypeVar("T")


class S3Storage(Storage):
    """The bucket must exist; nothing is contacted before the first call.

    part_bytes: 5 MiB is the least that most servers take.  delays: seconds between tries.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        options: StorageOptions,
        *,
        part_bytes: int = PART_BYTES,
        delays: tuple[float, ...] = RETRY_DELAYS,
    ) -> None:
        prefix = prefix.strip("/")
        self._prefix = f"{check_key(prefix)}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        options = options.filled()
        self._trusting = options.accept_no_conditional_writes
        self._requests = Requests(bucket, options, delays)
        self._writer = Writer(self._requests, part_bytes=part_bytes, trusting=self._trusting)

    def __repr__(self) -> str:
        return f"S3Storage({self.url!r})"

    def open(self, key: str, *, if_match: str | None = None) -> BinaryIO:
        full = self._full(key)

        def get(start: int, etag: str | None) -> dict[str, Any]:
            wanted: dict[str, Any] = {} if etag is None else {"IfMatch": etag}
            if start:
                wanted["Range"] = f"bytes={start}-"
            return self._requests.call(f"read {full}", "get_object", Key=full, **wanted)

        reader = ObjectReader(get, f"{key} in {self.url}", if_match, self._requests.delays, DIGEST)
        return cast("BinaryIO", io.BufferedReader(reader, CHUNK_BYTES))

    def head(self, key: str) -> ObjectInfo | None:
        found = self._writer.head(self._full(key))
        if found is None:
            return None
        return ObjectInfo(key, found["ContentLength"], found["ETag"], found["LastModified"].timestamp())

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> ObjectInfo:
        return replace(self._writer.put_bytes(self._full(key), data, if_absent), key=key)

    def put_file(self, key: str, path: Path, *, if_absent: bool = False) -> ObjectInfo:
        with scratch_faults(f"read {path}"):
            return replace(self._writer.put_file(self._full(key), path, if_absent), key=key)

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> ObjectInfo:
        return replace(self._writer.put_stream(self._full(key), chunks), key=key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for page in self._pages(prefix):
            for found in page.get("Contents", ()):
                key = found["Key"][len(self._prefix) :]
                yield ObjectInfo(key, found["Size"], found["ETag"], found["LastModified"].timestamp())

    def folders(self, prefix: str) -> Iterator[str]:
        above = len(self._prefix) + len(prefix)
        for page in self._pages(prefix, Delimiter="/"):
            for found in page.get("CommonPrefixes", ()):
                yield found["Prefix"][above:-1]

    def delete(self, keys: Iterable[str]) -> None:
        def one(key: str) -> None:
            with suppress(ObjectNotFound):
                self._requests.call(f"delete {key}", "delete_object", Key=self._full(key))

        # One by one: DeleteObjects insists on a checksum header that not every server knows.
        with ThreadPoolExecutor(8, thread_name_prefix="pagemill-delete") as pool:
            for _ in pool.map(one, keys):
                pass

    @contextmanager
    def as_file(self, key: str) -> Iterator[Path]:
        def fetch() -> None:
            with scratch_faults(f"fetch {key}"), self.open(key) as stream, path.open("wb") as out:
                out.writelines(pieces(stream, CHUNK_BYTES))

        with ExitStack() as stack:
            with scratch_faults("make a temporary folder"):
                folder = stack.enter_context(scratch_folder())
            path = folder / key.rpartition("/")[2]
            _undamaged(fetch)
            yield path

    def get(self, key: str) -> bytes:
        return _undamaged(lambda: super(S3Storage, self).get(key))

    def check(self) -> None:
        requests = self._requests.hurried()
        writer = Writer(requests, part_bytes=PART_BYTES, trusting=self._trusting)
        key = self._full(f"check-{uuid.uuid4().hex}")
        writer.put_bytes(key, b"1", if_absent=True)
        try:
            if not self._trusting:
                self._check_condition(requests, key)
            requests.call("list objects", "list_objects_v2", Prefix=key, MaxKeys=1)
            requests.call("read objects", "get_object", Key=key)["Body"].close()
        finally:
            requests.call("delete objects", "delete_object", Key=key)

    def _check_condition(self, requests: Requests, key: str) -> None:
        """Raises unless a second put-if-absent is refused; many stand-ins take it and say nothing."""
        try:
            requests.call("write objects", "put_object", lambda: io.BytesIO(b"2"), Key=key, IfNoneMatch="*")
        except PreconditionFailed:
            return
        raise self._writer.not_conditional()

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _pages(self, prefix: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        parameters["Prefix"] = self._prefix + check_prefix(prefix)
        while True:
            page = self._requests.call(f"list {prefix or 'objects'}", "list_objects_v2", **parameters)
            yield page
            if not page.get("IsTruncated"):
                return
            parameters["ContinuationToken"] = page["NextContinuationToken"]


def _undamaged(read: Callable[[], T]) -> T:
    for _ in range(READS - 1):
        with suppress(Damaged):
            return read()
    return read()
