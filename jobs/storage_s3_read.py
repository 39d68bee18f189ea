"""An object of an S3 store as a stream that survives a broken connection.

A read that breaks off goes on from the byte it had reached, on condition that the object is still the same
one (If-Match), so that a long input is never read half from one upload and half from another. An object that
says its own digest is held against it at its end: not every server sends checksums with what it is asked for,
and a single wrong bit in a plan or a manifest would be believed. This room may not know how requests are
made: it is given a function that opens the object at a byte.
"""

from __future__ import annotations

import base64
import hashlib
import io
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, FlexibleChecksumError
from urllib3.exceptions import HTTPError

from pagemill.jobs.errors import PreconditionFailed, StorageError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class Damaged(StorageError):
    """The bytes that arrived are not those that were written."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} arrived damaged.", transient=True)


class ObjectReader(io.RawIOBase):
    """get(start, etag): S3's answer to a GET from that byte on, on condition of the etag where one is given.
    digest: the name under which the object's metadata may hold its MD5, in base64.

    Raises what `get` raises; PreconditionFailed when the object changed; Damaged instead of the last bytes of
    an object that is not what its digest says; StorageError when the bytes keep breaking off at one place.
    """

    def __init__(
        self,
        get: Callable[[int, str | None], dict[str, Any]],
        name: str,
        if_match: str | None,
        delays: Sequence[float],
        digest: str = "",
    ) -> None:
        self._get = get
        self._name = name
        self._delays = delays
        self._position = 0
        answer = get(0, if_match)
        self._etag: str = answer["ETag"]
        # Not every server honours If-Match on a read; all of them send the etag.
        if if_match is not None and self._etag != if_match:
            answer["Body"].close()
            raise PreconditionFailed(f"{name} was changed since it was looked at.")
        self._size: int = answer["ContentLength"]
        self._said: str | None = answer.get("Metadata", {}).get(digest)
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._body: Any = answer["Body"]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        if not view or self._position >= self._size:
            return 0
        data = self._read(min(len(view), self._size - self._position))
        view[: len(data)] = data
        self._position += len(data)
        if self._said is not None:
            self._check(data, self._said)
        return len(data)

    def _check(self, data: bytes, said: str) -> None:
        self._md5.update(data)
        if self._position == self._size and base64.b64encode(self._md5.digest()).decode() != said:
            raise Damaged(self._name)

    def _read(self, most: int) -> bytes:
        for delay in (*self._delays, None):
            try:
                if self._body is None:
                    self._body = self._get(self._position, self._etag)["Body"]
                data: bytes = self._body.read(most)
            except FlexibleChecksumError as error:
                raise Damaged(self._name) from error
            except (BotoCoreError, HTTPError, OSError):
                data = b""
            if data:
                return data
            self._drop()
            if delay is not None:
                time.sleep(delay)
        raise StorageError(f"Reading {self._name} keeps breaking off.", transient=True)

    def _drop(self) -> None:
        if self._body is not None:
            with suppress(BotoCoreError, HTTPError, OSError):
                self._body.close()
            self._body = None

    def close(self) -> None:
        if not self.closed:
            self._drop()
        super().close()
