"""Whatever a caller calls "prompts" becomes one stream of JSONL bytes with a name and a compression suffix.

Takes paths, URIs, open binary files, bytes, and iterables or async iterables of rows, of any length in
bounded
memory: nothing here keeps more than one chunk. A row is only written down, never judged: what is wrong with
it is found by the plan, and becomes that row's error. What cannot be written as JSON at all is the caller's
mistake and raises before anything is submitted. This room may not know where the bytes go.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from pagemill.jobs.errors import ObjectNotFound, UsageError
from pagemill.jobs.storage import StorageOptions, open_storage

# A prompt as text or token ids, a conversation as messages, or a whole line in either shape.
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
Prompts: TypeAlias = (
    str
    | os.PathLike[str]
    | bytes
    | BinaryIO
    | Iterable[Prompt]
    | Iterable[bytes]
    | AsyncIterable[Prompt]
    | AsyncIterable[bytes]
)

CHUNK = 1 << 20
HOP = 256  # rows
COMPRESSED = (".gz", ".zst")
# Formats that people try first and that would fail line by line: said at once instead.
NOT_JSONL = {
    ".parquet": "a Parquet file",
    ".csv": "a CSV file",
    ".tsv": "a TSV file",
    ".xlsx": "a spreadsheet",
    ".zip": "a ZIP archive",
    ".tar": "an archive",
    ".tgz": "an archive",
    ".bz2": "bzip2",
    ".xz": "xz",
}


@dataclass(frozen=True, slots=True)
class Source:
    """An input before it is uploaded.

    name: for people. suffix: "", ".gz" or ".zst", how the bytes are packed. chunks: starts reading; it runs
    in a thread and may block. again: whether `chunks` may be called twice and gives the same bytes.
    """

    name: str
    suffix: str
    chunks: Callable[[], Iterator[bytes]]
    again: bool = False


def open_source(prompts: Prompts, options: StorageOptions, *, name: str | None = None) -> Source:
    """The source behind anything that `Client.submit` takes; must be called in the loop of an async iterable.

    Raises UsageError for what is not there, cannot be read, or is no input at all.
    """
    if isinstance(prompts, str | os.PathLike):
        return _from_address(os.fspath(prompts), options, name)
    suffix = compression(name or "")
    if isinstance(prompts, bytes | bytearray | memoryview):
        data = bytes(prompts)
        return Source(name or "bytes", suffix, lambda: iter((data,)), again=True)
    if isinstance(prompts, io.TextIOBase):
        raise UsageError("This file is open as text; open it with mode 'rb', or give its path.")
    if hasattr(prompts, "read"):
        file = cast(BinaryIO, prompts)
        return Source(
            name or _file_name(file), compression(name or _file_name(file)), lambda: read_chunks(file)
        )
    if hasattr(prompts, "__arrow_c_stream__") or hasattr(prompts, "columns"):
        raise UsageError(
            "A table is not a list of prompts; give one column of it, e.g. table['prompt'].to_pylist()."
        )
    if isinstance(prompts, Mapping):
        raise UsageError("One row goes in a list: submit([{...}], …).")
    if isinstance(prompts, AsyncIterable):
        loop = asyncio.get_running_loop()
        return Source(name or "rows", suffix, lambda: _packed(_pulled(aiter(prompts), loop)))
    if isinstance(prompts, Iterable):
        return Source(
            name or "rows", suffix, lambda: _packed(iter(prompts)), again=isinstance(prompts, list | tuple)
        )
    raise UsageError(f"Cannot take prompts from a {type(prompts).__name__}; give a path, a URI or rows.")


def compression(name: str) -> str:
    """The suffix that says how a file is packed; UsageError for a file that is no JSONL."""
    suffix = Path(name).suffix.lower()
    if suffix in COMPRESSED:
        return suffix
    if suffix in NOT_JSONL:
        raise UsageError(
            f"{name} is {NOT_JSONL[suffix]}; Pagemill takes JSONL, plain or packed as .gz or .zst."
        )
    return ""


def read_chunks(file: BinaryIO) -> Iterator[bytes]:
    """A binary file in pieces, as they come (a pipe gives what it has rather than waiting for a full
    chunk)."""
    read: Callable[[int], bytes | str] = getattr(file, "read1", file.read)
    while True:
        try:
            chunk = read(CHUNK)
        except OSError as error:  # else it would pass for a fault of the store that the bytes go to
            raise UsageError(f"Cannot read {_file_name(file)}: {error.strerror or error}.") from error
        if isinstance(chunk, str):
            raise UsageError("This file is open as text; open it with mode 'rb', or give its path.")
        if not chunk:
            return
        yield chunk


def _file_name(file: BinaryIO) -> str:
    name = getattr(file, "name", None)
    return Path(name).name if isinstance(name, str) else "stream"


def _from_address(address: str, options: StorageOptions, name: str | None) -> Source:
    scheme = urlsplit(address).scheme if "://" in address else ""
    if scheme == "s3":
        return _from_store(address, options, name)
    if scheme not in ("", "file"):
        raise UsageError(
            f"Cannot read {address}: input comes from a file, file:// or s3://, not {scheme}://."
        )
    path = Path(unquote(urlsplit(address).path)) if scheme else Path(address).expanduser()
    return _from_path(path, name)


def _from_path(path: Path, name: str | None) -> Source:
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name one file in it.")
    suffix = compression(name or path.name)

    def chunks() -> Iterator[bytes]:
        with _opened(path) as file:
            yield from read_chunks(file)

    _opened(path).close() if path.is_file() else _must_exist(path)
    return Source(name or path.name, suffix, chunks, again=path.is_file())


def _must_exist(path: Path) -> None:
    if not path.exists():
        hint = "" if path.suffix else ' (a prompt itself goes in a list: submit(["…"], …))'
        raise UsageError(f"There is no file {path}{hint}.")


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror or error}.") from error


def _from_store(address: str, options: StorageOptions, name: str | None) -> Source:
    folder, _, key = address.rpartition("/")
    if not key or folder == "s3:/":
        raise UsageError(f"{address} names no object; write s3://bucket/folder/file.jsonl.")
    suffix = compression(name or key)

    def chunks() -> Iterator[bytes]:
        try:
            with open_storage(folder, options).open(key) as file:
                yield from read_chunks(file)
        except ObjectNotFound as error:
            raise UsageError(f"There is no object {address}.") from error

    return Source(name or key, suffix, chunks, again=True)


def _pulled(rows: AsyncIterator[Any], loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    """Rows of an async iterator, for a thread: a batch a hop, since a hop costs more than most rows."""

    async def batch() -> list[Any]:
        got: list[Any] = []
        async for row in rows:
            got.append(row)
            if len(got) >= HOP:
                break
        return got

    while got := asyncio.run_coroutine_threadsafe(batch(), loop).result():
        yield from got


def _packed(rows: Iterator[Any]) -> Iterator[bytes]:
    """JSONL in chunks of about CHUNK bytes; items that are bytes already pass through as they are."""
    buffer = bytearray()
    raw: bool | None = None
    for index, row in enumerate(rows):
        is_raw = isinstance(row, bytes | bytearray | memoryview)
        if raw is None:
            raw = is_raw
        elif raw is not is_raw:
            raise UsageError(f"Item {index} mixes bytes with rows; give JSONL as bytes, or rows, not both.")
        buffer += row if is_raw else row_line(row, index)
        if len(buffer) >= CHUNK:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


def row_line(row: Any, index: int) -> bytes:
    """One row as one JSON line. Lone surrogates and NaN pass: they are the row's fault, and the plan says
    so."""
    try:
        return json.dumps(_as_object(row, index), ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"Item {index} cannot be written as JSON: {error}.") from error


def _as_object(row: Any, index: int) -> Mapping[str, Any]:
    if isinstance(row, str):
        return {"prompt": row}
    if isinstance(row, Mapping):
        return row if isinstance(row, dict) else dict(row)
    if isinstance(row, Sequence):
        if row and all(isinstance(item, int) and not isinstance(item, bool) for item in row):
            return {"prompt": list(row)}
        return {"messages": list(row)}
    raise UsageError(
        f"Item {index} is a {type(row).__name__}; a row is text, token ids, messages, or a dict."
    )
