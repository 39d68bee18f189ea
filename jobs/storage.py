"""One interface to where objects live: an S3-compatible store, or a directory.

Sync and safe for threads; callers in an event loop use `asyncio.to_thread`. Every method either does
all of what it says or raises a StorageError in one clear sentence; `transient` tells whether trying
again later can help. What the two implementations share is here: keys, options, and decisions made by
put-if-absent. This room may not know what the objects mean.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast
from urllib.parse import unquote, urlsplit

from pagemill.jobs.errors import DiskFull, ObjectNotFound, PreconditionFailed, StorageError

Checksums = Literal["when_required", "when_supported"]
CHUNK_BYTES = 1 << 20
"""How much is read or written at once when an object passes through."""
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as it is now. `etag` changes with the content; `modified` is in seconds since 1970."""

    key: str
    size: int
    etag: str
    modified: float


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """How to reach an S3-compatible store; a directory needs none of it. None means: ask the environment.

    endpoint: `http://host:port` or `https://host`, with the scheme; unset is Amazon's own.
    path_style: the bucket in the path instead of the host name; unset is yes for a custom endpoint.
    checksums: boto3's newer checksums break many other stores, so unset is `when_required` for a
        custom endpoint and boto3's own default otherwise. Both directions follow it.
    accept_no_conditional_writes: take a store that cannot put-if-absent, with Redis as the only guard.
    """

    endpoint: str | None = None
    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    path_style: bool | None = None
    checksums: Checksums | None = None
    accept_no_conditional_writes: bool = False

    def filled(self, env: Mapping[str, str] | None = None) -> StorageOptions:
        """These options with what is unset taken from the environment (boto3's own chain follows for
        the keys)."""
        env = os.environ if env is None else env
        endpoint = self.endpoint or _first(
            env, "PAGEMILL_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"
        )
        checksums = self.checksums or _first(env, "PAGEMILL_S3_CHECKSUMS")
        if checksums not in (None, "when_required", "when_supported"):
            raise StorageError(
                f"PAGEMILL_S3_CHECKSUMS is {checksums!r}: it must be when_required or when_supported."
            )
        path_style = self.path_style
        if path_style is None:
            path_style = _flag(env, "PAGEMILL_S3_PATH_STYLE")
        accept = self.accept_no_conditional_writes or _flag(env, "PAGEMILL_S3_ACCEPT_NO_CONDITIONAL_WRITES")
        return replace(
            self,
            endpoint=endpoint,
            access_key=self.access_key or _first(env, "PAGEMILL_S3_ACCESS_KEY"),
            secret_key=self.secret_key or _first(env, "PAGEMILL_S3_SECRET_KEY"),
            region=self.region or _first(env, "PAGEMILL_S3_REGION", "AWS_REGION", "AWS_DEFAULT_REGION"),
            path_style=path_style,
            checksums=cast("Checksums | None", checksums),
            accept_no_conditional_writes=bool(accept),
        )


def _first(env: Mapping[str, str], *names: str) -> str | None:
    return next((env[name] for name in names if env.get(name)), None)


def _flag(env: Mapping[str, str], name: str) -> bool | None:
    value = env.get(name, "").strip().lower()
    if not value:
        return None
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise StorageError(f"{name} is {value!r}: it must be 1 or 0.")


class Storage(ABC):
    """A flat space of immutable-by-habit objects named by keys (see `check_key`)."""

    url: str
    """What `open_storage` takes to come back here; never with credentials."""

    @abstractmethod
    def open(self, key: str, *, if_match: str | None = None) -> BinaryIO:
        """The object as a stream. Raises ObjectNotFound, or PreconditionFailed when its etag is another."""

    @abstractmethod
    def head(self, key: str) -> ObjectInfo | None: ...

    @abstractmethod
    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> ObjectInfo:
        """Writes the whole object or nothing. With if_absent, PreconditionFailed when there is one already
        that this very call did not write."""

    @abstractmethod
    def put_file(self, key: str, path: Path, *, if_absent: bool = False) -> ObjectInfo: ...

    @abstractmethod
    def put_stream(self, key: str, chunks: Iterable[bytes]) -> ObjectInfo:
        """Writes chunks of any size, of unknown number, in bounded memory; an error from `chunks` leaves
        no object."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose keys start with this text, in an order that is the store's own."""

    @abstractmethod
    def folders(self, prefix: str) -> Iterator[str]:
        """Names between `prefix` (which ends in a slash, or is empty) and the next slash, each once; for a
        while perhaps also one whose objects are all deleted."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """What is not there counts as deleted."""

    @abstractmethod
    def as_file(self, key: str) -> AbstractContextManager[Path]:
        """The object as a local file to read while the context lasts: a copy, or the thing itself."""

    @abstractmethod
    def check(self) -> None:
        """Proves that this store can be read, written, listed and written conditionally; says what is
        wrong and how to mend it otherwise."""

    def get(self, key: str) -> bytes:
        with self.open(key) as stream:
            return stream.read()


def check_key(key: str) -> str:
    """A key is a relative path of ordinary names, the same in every store; anything else is a mistake of
    ours or an attempt to leave the store."""
    names = key.split("/")
    ordinary = all(
        name not in ("", ".", "..") and name.isprintable() and "\\" not in name and len(name.encode()) <= 255
        for name in names
    )
    if not ordinary or len(key.encode()) > 900:
        raise StorageError(f"{key!r} cannot be the key of an object.")
    return key


def check_prefix(prefix: str) -> str:
    if prefix:
        check_key(prefix.rstrip("/") if prefix.endswith("/") and prefix != "/" else prefix)
    return prefix


def open_storage(url: str | Path, options: StorageOptions | None = None) -> Storage:
    """`s3://bucket/prefix`, `file:///folder` or a plain path. Nothing is contacted or made yet."""
    text = str(url)
    if "://" not in text:
        return _local(text)
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise StorageError(
            "The storage URL holds credentials: leave them out and use AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY."
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise StorageError(f"{text!r} names another machine: write file:///folder with three slashes.")
        return _local(unquote(parts.path))
    if parts.scheme != "s3":
        raise StorageError(
            f"{parts.scheme}:// is no store that Pagemill knows: use s3://bucket/prefix or a folder."
        )
    if not parts.netloc:
        raise StorageError(f"{text!r} names no bucket: write s3://bucket/prefix.")
    # boto3 takes a third of a second to import, which a job in a folder need not pay.
    from pagemill.jobs.storage_s3 import S3Storage

    return S3Storage(parts.netloc, text.split("://", 1)[1].partition("/")[2], options or StorageOptions())


def _local(path: str) -> Storage:
    from pagemill.jobs.storage_local import LocalStorage  # it imports this module

    if not path or "\0" in path:
        raise StorageError("The storage folder has no usable name.")
    return LocalStorage(Path(path))


@contextmanager
def scratch_faults(action: str) -> Iterator[None]:
    """Errors of local files (temporary ones, inputs) as StorageErrors in one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise DiskFull(
                f"Could not {action}: the disk for temporary files ({tempfile.gettempdir()}) is full; free"
                " some space, or set TMPDIR to a larger one."
            ) from error
        raise StorageError(f"Could not {action}: {error.strerror or type(error).__name__}.") from error


def encode_json(doc: Mapping[str, Any]) -> bytes:
    """Canonical, so that two equal documents are equal bytes."""
    return json.dumps(
        doc, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
    ).encode()


def read_json(storage: Storage, key: str) -> dict[str, Any] | None:
    """The JSON object under this key, or None when there is no such key."""
    try:
        data = storage.get(key)
    except ObjectNotFound:
        return None
    try:
        doc = json.loads(data)
    except ValueError:
        doc = None
    if not isinstance(doc, dict):
        raise StorageError(f"{key} in {storage.url} is damaged: it does not hold a JSON object.")
    return doc


def decide(storage: Storage, key: str, doc: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Makes a decision that everybody finds: the first document put under this key is the one that counts.

    Returns it, and whether it is ours. A refusal can be the echo of our own write whose reply was lost
    (in this call or in an earlier life of this process), so equal bytes are ours.
    """
    data = encode_json(doc)
    try:
        storage.put(key, data, if_absent=True)
    except PreconditionFailed:
        found = read_json(storage, key)
        if found is None:
            raise StorageError(
                f"{key} in {storage.url} was there and is gone: somebody deletes a running job's objects.",
                transient=True,
            ) from None
        return found, encode_json(found) == data
    return cast("dict[str, Any]", json.loads(data)), True
