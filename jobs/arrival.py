"""An input as it arrives from the store, and whether its bytes are the ones that were accepted.

A bit that flips on the way makes another prompt, or an error row of a good line, and the plan would make it
last. This room may not know what the bytes mean.
"""

from __future__ import annotations

import hashlib
from typing import Final

from pagemill.jobs.errors import StorageError
from pagemill.jobs.lines import ByteStream

PIECE: Final = 1 << 20


class Arrival:
    """Passes a stream on and hashes it. sha256: what the whole of it was, "" where nobody knows."""

    def __init__(self, stream: ByteStream, sha256: str, name: str) -> None:
        self._stream, self._said, self._name = stream, sha256, name
        self._hash = hashlib.sha256()

    def read(self, size: int, /) -> bytes:
        data = self._stream.read(size)
        if self._said:
            self._hash.update(data)
        return data

    def check(self) -> None:
        """Reads what is left. Raises StorageError, for another try, when it was not what was accepted."""
        if not self._said:
            return
        while self.read(PIECE):
            pass
        if self._hash.hexdigest() != self._said:
            raise StorageError(f"{self._name} arrived damaged.", transient=True)
