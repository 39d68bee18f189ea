"""Lines of an input: from bytes of a file, a pipe or an object body to numbered lines, in bounded memory.

This room knows bytes, newlines and two compressions. It may not know JSON, jobs or stores. Promise P3
lives here: lines end at the byte `\\n` alone (a unicode line separator inside a JSON string ends nothing),
one `\\r` before it is dropped, blank lines are counted but not yielded, one UTF-8 byte order mark is
accepted at the start.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import zstandard

from pagemill.jobs.errors import PlanRefused, RowFault

DEFAULT_MAX_LINE_BYTES: Final = 16 * 1024 * 1024
DEFAULT_MAX_EXPANDED_BYTES: Final = 1 << 40
CHUNK: Final = 256 * 1024
# A zstd block of four bytes may expand to 128 KiB. Fed a kilobyte at a time, the worst file there is
# expands to 32 MiB at once; fed whole chunks, to gigabytes.
ZSTD_FEED: Final = 1024
# What the zstd command accepts without being told to: longer windows need as much memory here.
ZSTD_MAX_WINDOW: Final = 1 << 27
_BLANKS: Final = b" \t\r"  # JSON's white space; a form feed is content, and bad content at that
_BOM: Final = b"\xef\xbb\xbf"


class ByteStream(Protocol):
    """All that is asked of an input: an open file, a pipe, an HTTP body."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Line:
    """One non-blank line.

    number: physical, 1-based, blank lines included.  row_index: 0-based over non-blank lines.
    data: without line end; empty where the line was too long.  fault: what was wrong already here.
    """

    number: int
    row_index: int
    data: bytes
    fault: RowFault | None = None


def read_lines(
    stream: ByteStream,
    *,
    suffix: str = "",
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    max_expanded_bytes: int = DEFAULT_MAX_EXPANDED_BYTES,
) -> Iterator[Line]:
    """Yield the non-blank lines of a stream that is read once, front to back.

    A line longer than max_line_bytes is skipped through and yielded with the fault `line_too_long`; the
    lines after it are read as usual. Memory: one line, one chunk, and the decompressor's window.

    Raises PlanRefused("invalid_encoding") for what spoils the whole file: UTF-16 and UTF-32, compressed
    data under another name, damaged or cut-off compressed data, more than max_expanded_bytes of it.
    What the stream itself raises passes through.
    """
    chunks = sound_chunks(stream, suffix, max_expanded_bytes)
    return _numbered(_split(chunks, max_line_bytes), max_line_bytes)


def sound_chunks(
    stream: ByteStream, suffix: str = "", max_expanded_bytes: int = DEFAULT_MAX_EXPANDED_BYTES
) -> Iterator[bytes]:
    """The unpacked bytes without a byte order mark, in chunks; raises PlanRefused as `read_lines` does."""
    return _checked_start(_expanded(stream, suffix, max_expanded_bytes))


# --- decompression -------------------------------------------------------------------------------


def _expanded(stream: ByteStream, suffix: str, limit: int) -> Iterator[bytes]:
    if suffix == "":
        return iter(lambda: stream.read(CHUNK), b"")
    readers: dict[str, Callable[[ByteStream], Iterator[bytes]]] = {".gz": _gunzip, ".zst": _unzstd}
    if suffix not in readers:
        raise PlanRefused("invalid_encoding", f"no reader for {suffix!r}: use .gz, .zst or neither.")
    return _capped(readers[suffix](stream), limit)


def _capped(chunks: Iterator[bytes], limit: int) -> Iterator[bytes]:
    total = 0
    for chunk in chunks:
        total += len(chunk)
        if total > limit:
            raise PlanRefused(
                "invalid_encoding",
                f"the compressed file expands to more than {limit:,} bytes: send it uncompressed.",
            )
        yield chunk


def _gunzip(stream: ByteStream) -> Iterator[bytes]:
    """All members of a gzip file, one after the other; checksums are checked, zero padding is allowed.

    (The library's own reader takes a pipe that gives a byte at a time for a file that is not gzip.)
    """
    member = zlib.decompressobj(wbits=31)
    begun, members = False, 0
    try:
        while piece := stream.read(CHUNK):
            while piece := piece if begun or not members else piece.lstrip(b"\0"):
                begun = True
                yield member.decompress(piece, CHUNK)
                piece = member.unconsumed_tail
                if member.eof:
                    piece, member = member.unused_data, zlib.decompressobj(wbits=31)
                    begun, members = False, members + 1
    except zlib.error as error:
        raise _damaged("gzip", _reason(error)) from None
    if begun:
        raise _damaged("gzip", "it ends in the middle")


def _unzstd(stream: ByteStream) -> Iterator[bytes]:
    """All frames of a zstd file. (The library's stream reader takes a file that was cut off for complete.)"""
    context = zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW)
    frame = context.decompressobj()
    begun = False
    try:
        while chunk := stream.read(CHUNK):
            for start in range(0, len(chunk), ZSTD_FEED):
                piece = chunk[start : start + ZSTD_FEED]
                while piece:
                    begun = True
                    yield from _portions(frame.decompress(piece))
                    piece = b""
                    if frame.eof:
                        piece, frame, begun = frame.unused_data, context.decompressobj(), False
    except zstandard.ZstdError as error:
        raise _damaged("zstd", _reason(error)) from None
    if begun:
        raise _damaged("zstd", "it ends in the middle")


def _portions(data: bytes) -> Iterator[bytes]:
    """Pieces of at most CHUNK: a piece is split into lines at once, and 32 MiB of newlines are 32 million."""
    if len(data) <= CHUNK:
        return iter((data,))
    return (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))


def _reason(error: Exception) -> str:
    return str(error).rstrip(".") or "its data make no sense"


def _damaged(kind: str, reason: str) -> PlanRefused:
    return PlanRefused(
        "invalid_encoding", f"the file is not sound {kind} data ({reason}): compress it again."
    )


# --- the whole file ------------------------------------------------------------------------------


def _checked_start(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Drop a byte order mark; refuse a file that no line of could be right."""
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= 4:
            break
    refused = _foreign(head)
    if refused is not None:
        raise PlanRefused("invalid_encoding", refused)
    yield head.removeprefix(_BOM)
    yield from chunks


def _foreign(head: bytes) -> str | None:
    if head[:2] in (b"\xff\xfe", b"\xfe\xff") or head[:4] == b"\x00\x00\xfe\xff":
        return "the file is UTF-16 or UTF-32 (its byte order mark says so): save it as UTF-8."
    # Without a mark, two ASCII characters give it away (RFC 4627, section 3).
    zeros = tuple(byte == 0 for byte in head[:4])
    if len(zeros) == 4 and zeros in _WIDE:
        return "the file looks like UTF-16 or UTF-32 (every other byte is zero): save it as UTF-8."
    if head[:2] == b"\x1f\x8b":
        return "the input is gzip data: give its file a name that ends in .gz, or unpack it before a pipe."
    if head[:4] == b"\x28\xb5\x2f\xfd":
        return "the input is zstd data: give its file a name that ends in .zst, or unpack it before a pipe."
    return None


_WIDE: Final = {
    (True, True, True, False),
    (False, True, True, True),
    (True, False, True, False),
    (False, True, False, True),
}


# --- lines ---------------------------------------------------------------------------------------


def _split(chunks: Iterator[bytes], limit: int) -> Iterator[bytes | None]:
    """Physical lines without their ends; None for one over the limit that is not blank."""
    tail = _Tail(limit)
    for chunk in chunks:
        pieces = chunk.split(b"\n")
        last = pieces.pop()
        if pieces:
            tail.add(pieces[0])
            yield tail.take()
            for piece in pieces[1:]:
                if len(piece) <= limit:
                    yield piece[:-1] if piece.endswith(b"\r") else piece
                else:
                    tail.add(piece)
                    yield tail.take()
        tail.add(last)
    if tail.size:
        yield tail.take()


class _Tail:
    """The line that has begun and not ended. Keeps no more of it than the limit allows."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._pieces: list[bytes] = []
        self._blank = True

    def add(self, piece: bytes) -> None:
        if not piece:
            return
        self.size += len(piece)
        self._pieces.append(piece)
        if self.size > self.limit + 1:  # one more may be a carriage return, which does not count
            self._blank = self._blank and not any(part.strip(_BLANKS) for part in self._pieces)
            self._pieces.clear()

    def take(self) -> bytes | None:
        line = b"".join(self._pieces)
        dropped = self.size > len(line)
        blank, self.size, self._blank = self._blank, 0, True
        self._pieces.clear()
        line = line.removesuffix(b"\r")
        if not dropped and len(line) <= self.limit:
            return line
        return b"" if blank and not line.strip(_BLANKS) else None


def _numbered(lines: Iterator[bytes | None], limit: int) -> Iterator[Line]:
    row_index = 0
    for number, data in enumerate(lines, 1):
        if data is None:
            message = f"line {number}: longer than {limit:,} bytes: shorten it or raise max_line_bytes"
            yield Line(number, row_index, b"", RowFault("line_too_long", message, number))
        elif data.strip(_BLANKS):
            yield Line(number, row_index, data)
        else:
            continue
        row_index += 1
