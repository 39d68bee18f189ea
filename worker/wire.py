"""What passes between a worker and its engine's process: newline-JSON, and a board in shared memory.

Both ends import this, so it stays free of asyncio, torch and Redis. It may not know what the messages mean.

    data      down  {"rid", "row", "context", "special", "priority", "group"} one line a row
              up    {"rid", "status", "choices", …}                           one line a row, always
    control   down  {"op": "start", …} first, then abort, shutdown
              up    {"op": "ready", …} or {"op": "failed", "message"}, then beats
    board           ids of the rows in the running step, and of the row being prepared

Every row that goes down comes up exactly once, an aborted one too: that answer is what returns its credit.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from collections.abc import Iterable
from typing import Any

BOARD_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


# One encoder for all messages: `json.dumps` with options builds a new one at each call.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def encode(message: dict[str, Any]) -> bytes:
    """One line. JSON escapes newlines inside strings, so a line end is always a message's end."""
    return _encode(message).encode() + b"\n"


def beside(*, context: int | None = None, special: str = "text", priority: int = 0, group: str = "") -> bytes:
    """What an engine is told of a row beside the row itself, a part of its line: alike for all of a shard.

    group: what the engine shares itself out among, and learns lengths of, the row's job.
    """
    return encode({"context": context, "special": special, "priority": priority, "group": group})[1:-2]


def row_line(rid: str, row: bytes, told: bytes) -> bytes:
    """The line of a row that is JSON text already, as a shard's object holds it: it is not written again.

    told: of `beside`.
    """
    return b"".join((b'{"rid":', _encode(rid).encode(), b",", told, b',"row":', row, b"}\n"))


def decode(line: bytes) -> dict[str, Any]:
    """The message of a line without its end."""
    message: dict[str, Any] = json.loads(line.decode())  # bytes would be searched for their encoding first
    return message


class Lines:
    """Cuts a byte stream into lines, whatever the sizes of its chunks."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes. A long line costs its length once, not once a chunk."""
        head, found, tail = chunk.rpartition(b"\n")
        if not found:
            self._rest.append(chunk)
            return []
        whole = b"".join((*self._rest, head))
        self._rest = [tail] if tail else []
        return whole.split(b"\n")


class Note:
    """A list of ids in shared memory that survives the death of its writer at any instant.

    It has two pages and a byte that says which one holds. The writer fills the other page and flips the byte
    last, so a reader never sees half a list. Ids over the page's size are left out: fewer suspects, never
    wrong ones.
    """

    __slots__ = ("_map", "_page", "_start")

    def __init__(self, memory: mmap.mmap, start: int, size: int) -> None:
        self._map, self._start, self._page = memory, start, (size - 8) // 2

    def write(self, ids: Iterable[str]) -> None:
        payload = "\n".join(ids).encode()
        if len(payload) > self._page - _LENGTH.size:
            payload = payload[: self._page - _LENGTH.size].rpartition(b"\n")[0]
        page = 1 - self._map[self._start]
        at = self._start + 8 + page * self._page
        _LENGTH.pack_into(self._map, at, len(payload))
        self._map[at + _LENGTH.size : at + _LENGTH.size + len(payload)] = payload
        self._map[self._start] = page

    def read(self) -> list[str]:
        at = self._start + 8 + self._map[self._start] * self._page
        (length,) = _LENGTH.unpack_from(self._map, at)
        payload = self._map[at + _LENGTH.size : at + _LENGTH.size + length]
        return payload.decode().split("\n") if payload else []


class Board:
    """The evidence that outlives an engine: which rows its process was working on when it died.

    step: rows of the step that runs, written before it is launched. prepare: the row being tokenised.
    """

    __slots__ = ("_map", "prepare", "step")

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, BOARD_BYTES)
        self.prepare = Note(self._map, 0, 4096)
        self.step = Note(self._map, 4096, BOARD_BYTES - 4096)

    def suspects(self) -> set[str]:
        return {*self.step.read(), *self.prepare.read()}

    def close(self) -> None:
        self._map.close()


def board_file() -> int:
    """A descriptor of fresh, zeroed shared memory that vanishes with its last holder."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("pagemill-board")
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, BOARD_BYTES)
    return fd
