"""Whatever a caller calls "prompts" becomes one stream of JSONL bytes with a name and a compression suffix.

Takes paths, URIs, open binary files, bytes, tables, and iterables or async iterables of rows, of any length
in bounded memory: nothing here keeps more than one chunk. A row is only written down, never judged: what is
wrong with it is found by the plan, and becomes that row's error. What cannot be written as JSON at all is the
caller's mistake and raises before anything is submitted. This room may not know where the bytes go.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from pagemill.jobs.columns import Columns
from pagemill.jobs.csv_rows import DELIMITERS, rows_of_csv
from pagemill.jobs.errors import ObjectNotFound, UsageError
from pagemill.jobs.request import UNREADABLE
from pagemill.jobs.storage import StorageOptions, open_storage
from pagemill.jobs.tables import is_table, rows_of_parquet, rows_of_table


class ArrowStream(Protocol):
    """A table or a column that exports Arrow data: of pyarrow, pandas, polars, …"""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


class ArrowArray(Protocol):
    """The same as one batch."""

    def __arrow_c_array__(self, requested_schema: object = None) -> Any: ...


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
    | ArrowStream
    | ArrowArray
)

CHUNK = 1 << 20
HOP = 256  # rows
ROWS = Columns()
COMPRESSED = (".gz", ".zst")
PARQUET = (".parquet", ".pq")
# Formats that people try first and that would fail line by line: said at once instead.
NOT_JSONL = {
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


def open_source(
    prompts: Prompts, options: StorageOptions, *, name: str | None = None, columns: Columns = ROWS
) -> Source:
    """The source behind anything that `Client.submit` takes; must be called in the loop of an async iterable.

    columns: what of a table is the prompt. Raises UsageError for what is not there, cannot be read, or is no
    input at all.
    """
    if isinstance(prompts, str | os.PathLike):
        return _from_address(os.fspath(prompts), options, name, columns)
    if isinstance(prompts, bytes | bytearray | memoryview):
        data = bytes(prompts)
        return _from_files(name or "bytes", lambda: io.BytesIO(data), columns, again=True)
    if isinstance(prompts, io.TextIOBase):
        raise UsageError("This file is open as text; open it with mode 'rb', or give its path.")
    if hasattr(prompts, "read"):
        file = cast(BinaryIO, prompts)
        return _from_files(name or _file_name(file), lambda: nullcontext(file), columns)
    if is_table(prompts):
        again = hasattr(prompts, "__len__")
        return Source(
            name or "table", "", lambda: _packed(rows_of_table(prompts, columns), columns.chat), again=again
        )
    return _from_rows(prompts, name, columns)


def _from_rows(prompts: Any, name: str | None, columns: Columns) -> Source:
    suffix = compression(name or "")
    if isinstance(prompts, Mapping):
        raise UsageError("One row goes in a list: submit([{...}], …).")
    if isinstance(prompts, AsyncIterable):
        loop = asyncio.get_running_loop()
        return Source(
            name or "rows",
            suffix,
            lambda: _packed(_lines(_pulled(aiter(prompts), loop), columns), columns.chat),
        )
    if isinstance(prompts, Iterable):
        return Source(
            name or "rows",
            suffix,
            lambda: _packed(_lines(iter(prompts), columns), columns.chat),
            again=isinstance(prompts, list | tuple),
        )
    raise UsageError(f"Cannot take prompts from {_kind(prompts)}; give a path, a URI or rows.")


def _lines(rows: Iterator[Any], columns: Columns) -> Iterator[Any]:
    """Dicts as rows of a table where columns are named; else the rows themselves."""
    if not columns.named:
        return rows
    line, nothing = columns.liner(), dict.fromkeys(columns.asked())
    wanted = "with prompt_column, template or id_column each is a dict"
    return (
        line({**nothing, **row}) if isinstance(row, Mapping) else _no_row(row, index, wanted)
        for index, row in enumerate(rows)
    )


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _no_row(value: object, index: int, wanted: str) -> dict[str, str]:
    """The line of what cannot be a row, which says so where it is read."""
    return _unreadable(f"the row is {_kind(value)}: {wanted}", index)


def _unreadable(why: str, index: int) -> dict[str, str]:
    """Raises UsageError for the very first row: where that is none, the call was meant otherwise."""
    if index == 0:
        raise UsageError(f"Of the first item: {why}.")
    return {UNREADABLE: why}


Opener = Callable[[], AbstractContextManager[Any]]


def _from_files(name: str, opened: Opener, columns: Columns, *, again: bool = False) -> Source:
    """A file of any format, which its name tells. opened: gives the file's bytes from the start."""
    path = Path(name)
    packed = path.suffix.lower() if path.suffix.lower() in COMPRESSED else ""
    kind = (path.with_suffix("") if packed else path).suffix.lower()
    if kind in PARQUET and packed:
        raise UsageError(f"{name} is packed twice; unpack it, since Parquet packs its columns itself.")
    if kind in PARQUET:
        return Source(name, "", lambda: _packed(rows_of_parquet(opened(), name, columns)), again)
    if kind in DELIMITERS:
        return Source(name, "", lambda: _packed(_csv(name, opened, columns, kind, packed)), again)
    if columns.named or columns.chat:
        raise UsageError(
            f"{name} is taken for JSONL, where each line says what it asks; a prompt column, a template, "
            "an id column and chat go with .parquet, .csv, .tsv, or a table."
        )
    suffix = compression(name)

    def chunks() -> Iterator[bytes]:
        with opened() as file:
            yield from read_chunks(file)

    return Source(name, suffix, chunks, again)


def _csv(name: str, opened: Opener, columns: Columns, kind: str, packed: str) -> Iterator[dict[str, Any]]:
    with opened() as file:
        chunks = Chunks(read_chunks(file))
        yield from rows_of_csv(chunks, name, columns, delimiter=DELIMITERS[kind], suffix=packed)


class Chunks:
    """Chunks as something to read from, in the sizes that they come in."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks

    def read(self, size: int, /) -> bytes:
        return next(self._chunks, b"")


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


def _from_address(address: str, options: StorageOptions, name: str | None, columns: Columns) -> Source:
    scheme = urlsplit(address).scheme if "://" in address else ""
    if scheme == "s3":
        return _from_store(address, options, name, columns)
    if scheme not in ("", "file"):
        raise UsageError(
            f"Cannot read {address}: input comes from a file, file:// or s3://, not {scheme}://."
        )
    path = Path(unquote(urlsplit(address).path)) if scheme else Path(address).expanduser()
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name one file in it.")
    source = _from_files(name or path.name, lambda: _opened(path), columns, again=path.is_file())
    _opened(path).close() if path.is_file() else _must_exist(path)
    return source


def _must_exist(path: Path) -> None:
    if not path.exists():
        hint = "" if path.suffix else ' (a prompt itself goes in a list: submit(["…"], …))'
        raise UsageError(f"There is no file {path}{hint}.")


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror or error}.") from error


def _from_store(address: str, options: StorageOptions, name: str | None, columns: Columns) -> Source:
    folder, _, key = address.rpartition("/")
    if not key or folder == "s3:/":
        raise UsageError(f"{address} names no object; write s3://bucket/folder/file.jsonl.")
    whole = Path(name or key).suffix.lower() in PARQUET  # is read from its end

    @contextmanager
    def opened() -> Iterator[Any]:
        storage = open_storage(folder, options)
        try:
            with storage.as_file(key) if whole else storage.open(key) as file:
                yield file
        except ObjectNotFound as error:
            raise UsageError(f"There is no object {address}.") from error

    return _from_files(name or key, opened, columns, again=True)


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


def _packed(rows: Iterator[Any], chat: bool = False) -> Iterator[bytes]:
    """JSONL in chunks of about CHUNK bytes; items that are bytes already pass through as they are."""
    buffer = bytearray()
    raw: bool | None = None
    for index, row in enumerate(rows):
        is_raw = isinstance(row, bytes | bytearray | memoryview)
        if raw is None:
            raw = is_raw
        elif raw is not is_raw:
            raise UsageError(f"Item {index} mixes bytes with rows; give JSONL as bytes, or rows, not both.")
        buffer += row if is_raw else row_line(row, index, chat)
        if len(buffer) >= CHUNK:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


def row_line(row: Any, index: int, chat: bool = False) -> bytes:
    """One row as one JSON line; chat: text is a user's message.

    Lone surrogates and NaN pass, and what is no row becomes a line that says so: all of them are the row's
    fault, and the plan says so.
    """
    try:
        text = json.dumps(_as_object(row, index, chat), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        text = json.dumps(_unreadable(f"the row cannot be written as JSON: {error}", index))
    return text.encode("utf-8", "surrogatepass") + b"\n"


def _as_object(row: Any, index: int, chat: bool) -> Mapping[str, Any]:
    if isinstance(row, str):
        return {"messages": [{"role": "user", "content": row}]} if chat else {"prompt": row}
    if isinstance(row, Mapping):
        return row if isinstance(row, dict) else dict(row)
    if isinstance(row, Sequence):
        if row and all(isinstance(item, int) and not isinstance(item, bool) for item in row):
            return {"prompt": list(row)}
        return {"messages": list(row)}
    return _no_row(row, index, "give text, token ids, messages, or a dict")
