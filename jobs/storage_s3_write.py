"""Writing to an S3 store: whole objects or none, and never twice.

A reply can get lost on its way, and the repeated write then meets its own success: a put-if-absent is
refused, a finished upload is unknown. So every write carries a mark of its own in the object's metadata,
and after such a refusal one HEAD tells whether the object there is ours. Bodies travel with Content-MD5,
which servers have always checked, instead of boto3's newer checksums, which many do not know.
"""

from __future__ import annotations

import base64
import hashlib
import io
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from pagemill.jobs.errors import ObjectNotFound, PreconditionFailed, StorageError
from pagemill.jobs.storage import CHUNK_BYTES, ObjectInfo
from pagemill.jobs.storage_s3_faults import NotConditional, UploadLost
from pagemill.jobs.storage_s3_requests import Requests

MOST_PARTS: Final = 10_000
_MARK: Final = "pagemill-write"
DIGEST: Final = "pagemill-md5"
"""The metadata that says what the object's bytes are, in base64, for storage_s3_read.py."""


class Writer:
    """Puts objects under full keys (the store's prefix included).

    part_bytes: every part of an upload but the last has exactly one size, since some servers insist.
    trusting: without conditional writes, look before writing instead of refusing to.
    """

    def __init__(self, requests: Requests, *, part_bytes: int, trusting: bool) -> None:
        self._requests = requests
        self._part_bytes = part_bytes
        self._trusting = trusting

    def put_bytes(self, key: str, data: bytes, if_absent: bool) -> ObjectInfo:
        return self._whole(key, lambda: io.BytesIO(data), len(data), _md5((data,)), if_absent)

    def put_file(self, key: str, path: Path, if_absent: bool) -> ObjectInfo:
        size = path.stat().st_size
        if size <= 2 * self._part_bytes:
            with path.open("rb") as stream:
                digest = _md5(pieces(stream, CHUNK_BYTES))
            return self._whole(key, lambda: path.open("rb"), size, digest, if_absent)
        part_bytes = max(self._part_bytes, -(-size // MOST_PARTS))
        for _ in range(2):
            with suppress(UploadLost), path.open("rb") as stream:
                return self._parts(key, pieces(stream, part_bytes), if_absent)
        with path.open("rb") as stream:
            return self._parts(key, pieces(stream, part_bytes), if_absent)

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> ObjectInfo:
        cut = _regrouped(chunks, self._part_bytes)
        first = next(cut, b"")
        second = next(cut, None)
        if second is None:
            return self.put_bytes(key, first, if_absent=False)
        return self._parts(key, _chain(first, second, cut), if_absent=False)

    def not_conditional(self) -> NotConditional:
        server = self._requests.place.server
        return NotConditional(
            f"{server[0].upper()}{server[1:]} has no conditional writes (If-None-Match), without which two"
            " workers could both commit: use another store, or set"
            " PAGEMILL_S3_ACCEPT_NO_CONDITIONAL_WRITES=1 to rely on Redis alone."
        )

    def _whole(
        self, key: str, body: Callable[[], BinaryIO], size: int, digest: str, if_absent: bool
    ) -> ObjectInfo:
        mark = uuid.uuid4().hex
        if if_absent and self._trusting and self.head(key) is not None:
            raise self._taken(key)
        try:
            answer = self._conditionally(
                if_absent,
                key,
                "put_object",
                body,
                ContentLength=size,
                ContentMD5=digest,
                Metadata={_MARK: mark, DIGEST: digest},
            )
        except PreconditionFailed:
            found = self._ours(key, mark)
            if found is None:
                raise self._taken(key) from None
            answer = found
        return ObjectInfo(key, size, answer["ETag"], time.time())

    def _parts(self, key: str, cut: Iterator[bytes], if_absent: bool) -> ObjectInfo:
        if if_absent and self.head(key) is not None:
            raise self._taken(key)  # saves the upload; its completion is what decides
        mark = uuid.uuid4().hex
        # boto3 adds checksums to the parts by itself, but Amazon wants to hear of them before and after.
        newer = self._requests.checksums == "when_supported"
        announced: dict[str, Any] = {"ChecksumAlgorithm": "CRC32"} if newer else {}
        begin = self._requests.call(
            f"write {key}", "create_multipart_upload", Key=key, Metadata={_MARK: mark}, **announced
        )
        upload = begin["UploadId"]
        try:
            parts, size = self._send(key, upload, cut)
            answer = self._complete(key, upload, mark, parts, if_absent)
        except BaseException:
            with suppress(StorageError):
                self._requests.once(f"write {key}", "abort_multipart_upload", Key=key, UploadId=upload)
            raise
        return ObjectInfo(key, size, answer["ETag"], time.time())

    def _send(self, key: str, upload: str, cut: Iterator[bytes]) -> tuple[list[dict[str, Any]], int]:
        parts: list[dict[str, Any]] = []
        size = 0
        for number, piece in enumerate(cut, start=1):
            if number > MOST_PARTS:
                most = MOST_PARTS * self._part_bytes >> 30
                raise StorageError(f"Could not write {key}: it is larger than {most} GiB.")
            answer = self._requests.call(
                f"write {key}",
                "upload_part",
                lambda piece=piece: io.BytesIO(piece),  # type: ignore[misc]
                Key=key,
                UploadId=upload,
                PartNumber=number,
                ContentLength=len(piece),
                ContentMD5=_md5((piece,)),
            )
            parts.append({"PartNumber": number, "ETag": answer["ETag"]})
            if "ChecksumCRC32" in answer:
                parts[-1]["ChecksumCRC32"] = answer["ChecksumCRC32"]
            size += len(piece)
        return parts, size

    def _complete(
        self, key: str, upload: str, mark: str, parts: list[dict[str, Any]], if_absent: bool
    ) -> dict[str, Any]:
        try:
            return self._conditionally(
                if_absent,
                key,
                "complete_multipart_upload",
                UploadId=upload,
                MultipartUpload={"Parts": parts},
            )
        except (PreconditionFailed, UploadLost) as refusal:
            # Either somebody was first, or this is the echo of our own success.
            found = self._ours(key, mark)
            if found is not None:
                return found
            raise self._taken(key) if isinstance(refusal, PreconditionFailed) else refusal from None

    def _conditionally(
        self,
        if_absent: bool,
        key: str,
        operation: str,
        body: Callable[[], BinaryIO] | None = None,
        **parameters: Any,
    ) -> dict[str, Any]:
        action = f"write {key}"
        if not if_absent:
            return self._requests.call(action, operation, body, Key=key, **parameters)
        try:
            return self._requests.call(action, operation, body, Key=key, IfNoneMatch="*", **parameters)
        except NotConditional:
            if not self._trusting:
                raise self.not_conditional() from None
            return self._requests.call(action, operation, body, Key=key, **parameters)

    def head(self, key: str) -> dict[str, Any] | None:
        try:
            return self._requests.call(f"look at {key}", "head_object", Key=key)
        except ObjectNotFound:
            return None

    def _ours(self, key: str, mark: str) -> dict[str, Any] | None:
        """The object, when it is the one that the write with this mark made."""
        found = self.head(key)
        return found if found is not None and found.get("Metadata", {}).get(_MARK) == mark else None

    def _taken(self, key: str) -> PreconditionFailed:
        return PreconditionFailed(f"There is already an object {key} in bucket {self._requests.bucket!r}.")


def pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """The stream in pieces of this size, but for the last."""
    while piece := stream.read(size):
        yield piece


def _md5(data: Iterable[bytes]) -> str:
    """For Content-MD5, which guards against broken lines, not against people."""
    digest = hashlib.md5(usedforsecurity=False)
    for piece in data:
        digest.update(piece)
    return base64.b64encode(digest.digest()).decode()


def _regrouped(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of exactly this size, but for the last."""
    held = bytearray()
    for chunk in chunks:
        view = memoryview(chunk)
        while view:
            taken = view[: size - len(held)]
            held += taken
            view = view[len(taken) :]
            if len(held) == size:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)


def _chain(first: bytes, second: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield second
    yield from rest
