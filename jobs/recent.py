"""The rows that failed lately, for whoever watches a job: how many with which code, and the last few.

Told by the job's events, read from the plan's and the shards' parts as they are published; a watcher who is
late misses some, and learns the whole count from the manifest. What cannot be read just now is left out:
looking on must never fail because of it. This room may not know how anything is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from pagemill.jobs import layout
from pagemill.jobs.errors import PagemillError
from pagemill.jobs.storage import Storage, read_json

if TYPE_CHECKING:
    from pagemill.jobs.client import Client

KEPT: Final = 5
PARTS_AT_ONCE: Final = 4
MOST_BYTES: Final = 8 << 20
"""Larger parts are counted and not opened."""


class RecentErrors:
    """codes: how many rows failed with each code, as far as it is known. latest: "code: message", newest
    last; `told` counts all that were ever in it."""

    def __init__(self, client: Client, job: str) -> None:
        self._client = client
        self._job = job
        self._after = "0"
        self.codes: Counter[str] = Counter()
        self.latest: deque[str] = deque(maxlen=KEPT)
        self.told = 0

    async def look(self, *, ended: bool = False) -> None:
        """Reads what was published since the last look. Never raises a PagemillError."""
        with contextlib.suppress(PagemillError):
            state = await self._client.state()
            events = await state.events(self._job, self._after, block_ms=1)
            self._after = events[-1].id if events else self._after
            await asyncio.to_thread(
                self._read,
                any(event.kind == "planned" for event in events),
                [int(event.data["shard"]) for event in events if event.kind == "committed"],
                ended,
            )

    def _read(self, planned: bool, shards: list[int], ended: bool) -> None:
        storage = self._client.storage
        if planned and (plan := read_json(storage, layout.plan(self._job))) is not None:
            self.codes.update(plan.get("errors", {}))
            self._add(storage, plan.get("error_parts", [])[:1])
        records = (read_json(storage, layout.commit(self._job, shard)) for shard in shards[-PARTS_AT_ONCE:])
        parts = [record["part"] for record in records if record is not None and record["part"]["failed"]]
        for part in parts:
            self.codes.update(part.get("errors", {}))
        self._add(storage, parts)
        if ended and (manifest := read_json(storage, layout.manifest(self._job))) is not None:
            self.codes = Counter(manifest.get("errors", {}))

    def _add(self, storage: Storage, parts: Iterable[dict[str, Any]]) -> None:
        for part in parts:
            if part["bytes"] <= MOST_BYTES:
                for text in _failed(storage, part["key"]):
                    self.latest.append(text)
                    self.told += 1


def _failed(storage: Storage, key: str) -> list[str]:
    """The last failed rows of a part, in words."""
    from pagemill.jobs.parquet import read_batches  # with Arrow, which takes a quarter of a second to load

    found: deque[str] = deque(maxlen=KEPT)
    with storage.as_file(key) as path:
        columns = ["status", "error_code", "error_message"]
        for batch in read_batches(path, columns=columns, name=key):
            for status, code, message in zip(*(batch[name].to_pylist() for name in columns), strict=True):
                if status == "failed":
                    found.append(f"{code}: {message}")
    return list(found)
