"""An input is planned as it was accepted, or it is read again."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from pagemill.jobs import layout
from pagemill.jobs.arrival import Arrival
from pagemill.jobs.errors import StorageError
from pagemill.jobs.plan import make_plan, read_shard
from pagemill.jobs.spec import InputRef, JobSpec
from pagemill.jobs.storage import read_json
from pagemill.jobs.storage_local import LocalStorage

CONTENT = b'{"prompt": "a river"}\n{"prompt": "a lake"}\n'


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_what_arrives_as_it_was_passes_whether_or_not_it_was_read_to_its_end() -> None:
    for size in (0, 5, len(CONTENT)):
        arrival = Arrival(io.BytesIO(CONTENT), sha256(CONTENT), "input")
        assert arrival.read(size) == CONTENT[:size]
        arrival.check()


def test_one_wrong_bit_is_an_error_that_passes_by_itself() -> None:
    arrival = Arrival(io.BytesIO(CONTENT.replace(b"a", b"c", 1)), sha256(CONTENT), "input")
    with pytest.raises(StorageError, match="input arrived damaged") as caught:
        arrival.check()
    assert caught.value.transient


def test_an_input_of_unknown_hash_is_taken_as_it_comes() -> None:
    Arrival(io.BytesIO(CONTENT), "", "input").check()


class Damaging(LocalStorage):
    """The input arrives with these bytes instead of its own, the first time."""

    instead: bytes | None = None

    def open(self, key: str, *, if_match: str | None = None) -> BinaryIO:
        stream = super().open(key, if_match=if_match)
        if self.instead is None or not key.endswith(".jsonl"):
            return stream
        stream.close()
        found, self.instead = io.BytesIO(self.instead), None
        return found


@pytest.mark.parametrize(
    ("damaged", "terms"),
    [
        (CONTENT.replace(b"river", b"diver"), {}),
        (CONTENT.replace(b"}", b"{", 1), {"strict": True}),
        (CONTENT.replace(b"lake", b"\nak\n"), {"max_rows": 2}),
        (b"\xff\xfe" + CONTENT[2:], {}),
        (CONTENT[:10], {}),
    ],
)
def test_no_plan_and_no_refusal_comes_of_damaged_bytes(
    tmp_path: Path, damaged: bytes, terms: dict[str, Any]
) -> None:
    storage = Damaging(tmp_path / "store")
    info = storage.put(layout.input("job"), CONTENT)
    source = InputRef(key=info.key, size=info.size, etag=info.etag, sha256=sha256(CONTENT))
    spec = JobSpec(job="job", model="m", created_at=0.0, input=source, seed=1, **terms)
    storage.instead = damaged
    with pytest.raises(StorageError, match="arrived damaged"):
        make_plan(storage, spec, fence="0-1", fingerprint=None, stopped=lambda: None)
    assert read_json(storage, layout.plan("job")) is None
    plan = make_plan(storage, spec, fence="0-2", fingerprint=None, stopped=lambda: None)
    rows = [row.prompt for entry in plan["shards"] for row in read_shard(storage, entry)]
    assert sorted(map(str, rows)) == ["a lake", "a river"]
