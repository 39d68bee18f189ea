"""An object of an S3 store as a stream that survives a broken connection.

A read that breaks off goes on from the byte it had reached, on condition that the object is still the same
one (If-Match), so that a long input is never read half from one upload and half from another. This room
may not know how requests are made: it is given a function that opens the object at a byte.
"""

from __future__ import annotations

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


class ObjectReader(io.RawIOBase):
    """get(start, etag): S3's answer to a GET from that byte on, on condition of the etag where one is given.

    Raises what `get` raises; PreconditionFailed when the object changed; StorageError when the bytes keep
    breaking off at one place.
    """

    def __init__(
        self,
        get: Callable[[int, str | None], dict[str, Any]],
        name: str,
        if_match: str | None,
        delays: Sequence[float],
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
        return len(data)

    def _read(self, most: int) -> bytes:
        for delay in (*self._delays, None):
            try:
                if self._body is None:
                    self._body = self._get(self._position, self._etag)["Body"]
                data: bytes = self._body.read(most)
            except FlexibleChecksumError as error:
                raise StorageError(f"{self._name} arrived damaged.", transient=True) from error
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
