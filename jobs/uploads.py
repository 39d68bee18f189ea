"""Many small objects on their way to the store at once, in bounded memory.

A put takes a round trip, and a plan may need ten thousand of them. This room knows keys and bytes. It may
not know what they mean.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

from pagemill.jobs.errors import StorageError
from pagemill.jobs.storage import Storage

THREADS: Final = 4
# Waiting ones hold their bytes.
WAITING: Final = 8
ATTEMPTS: Final = 3


class Uploads:
    """`put` returns soon; a block left without an error means that all is stored and was read back.

    The first failure is raised by a later `put` or by leaving the block.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="pagemill upload")
        self._under_way: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while error is None and self._under_way:
                self._under_way.popleft().result()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def put(self, key: str, data: bytes) -> None:
        while len(self._under_way) >= WAITING:
            self._under_way.popleft().result()
        self._under_way.append(self._pool.submit(self._send, key, data))

    def _send(self, key: str, data: bytes) -> None:
        for _ in range(ATTEMPTS):
            self._storage.put(key, data)
            if self._storage.get(key) == data:
                return
        raise StorageError(
            f"{self._storage.url} damages what it stores: {key} does not come back as it was sent."
        )
