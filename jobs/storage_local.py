"""A directory as an object store: whole objects or none, also after a power cut.

An object is written to a temporary file in the same file system, synced, and only then given its name
(by a rename, or by a hard link where the name must be free), and the directory is synced too. So a
killed writer leaves at most a file in `.pagemill-tmp`, which no reader and no listing ever looks at.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pagemill.jobs.errors import DiskFull, ObjectNotFound, PreconditionFailed, StorageError
from pagemill.jobs.storage import (
    CHUNK_BYTES,
    DISK_FULL,
    ObjectInfo,
    Storage,
    check_key,
    check_prefix,
    scratch_faults,
)

TEMPORARY = ".pagemill-tmp"
LEFTOVER_AGE_S = 24 * 3600.0
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalStorage(Storage):
    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root.expanduser()))  # noqa: PTH100 (resolve() would follow links)
        self._temporary = self._root / TEMPORARY
        self.url = self._root.as_uri()

    def __repr__(self) -> str:
        return f"LocalStorage({self.url!r})"

    def open(self, key: str, *, if_match: str | None = None) -> BinaryIO:
        path = self._path(key)
        try:
            stream = path.open("rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ObjectNotFound(f"There is no object {key} in {self.url}.") from None
        except OSError as error:
            raise self._fault(error, f"read {key}") from error
        # The status of the open file, not of the name: what is read is what was compared.
        if if_match is not None and _info(key, os.fstat(stream.fileno())).etag != if_match:
            stream.close()
            raise PreconditionFailed(f"{key} in {self.url} was changed since it was looked at.")
        return stream

    def head(self, key: str) -> ObjectInfo | None:
        path = self._path(key)
        try:
            return _info(key, path.stat()) if path.is_file() else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._fault(error, f"look at {key}") from error

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> ObjectInfo:
        return self._publish(key, lambda out: _write_all(out, (data,)), if_absent)

    def put_file(self, key: str, path: Path, *, if_absent: bool = False) -> ObjectInfo:
        with scratch_faults(f"read {path}"):
            source = path.open("rb")
        with source:
            return self._publish(key, lambda out: shutil.copyfileobj(source, out, CHUNK_BYTES), if_absent)

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> ObjectInfo:
        return self._publish(key, lambda out: _write_all(out, chunks), if_absent=False)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix).rpartition("/")[0]
        yield from self._walk(folder + "/" if folder else "", prefix)

    def folders(self, prefix: str) -> Iterator[str]:
        check_prefix(prefix)
        for name in self._entries(prefix):
            if name.endswith("/") and any(True for _ in self._walk(prefix + name, prefix + name)):
                yield name[:-1]

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            try:
                path.unlink(missing_ok=True)
                self._drop_empty(path.parent)
            except NotADirectoryError:
                continue
            except OSError as error:
                raise self._fault(error, f"delete {key}") from error

    @contextmanager
    def as_file(self, key: str) -> Iterator[Path]:
        path = self._path(key)
        if not path.is_file():
            raise ObjectNotFound(f"There is no object {key} in {self.url}.")
        yield path

    def check(self) -> None:
        key = f"check-{uuid.uuid4().hex}"
        self.put(key, b"1", if_absent=True)
        try:
            self.put(key, b"2", if_absent=True)
        except PreconditionFailed:
            pass
        else:
            raise StorageError(
                f"The folder {self._root} lets a link replace an existing file: use another file system."
            )
        finally:
            self.delete([key])
        self._sweep_leftovers()

    def _path(self, key: str) -> Path:
        check_key(key)
        if key.split("/", 1)[0] == TEMPORARY:
            raise StorageError(f"{key!r} cannot be the key of an object.")
        return self._root / key

    def _publish(self, key: str, write: Callable[[BinaryIO], None], if_absent: bool) -> ObjectInfo:
        path = self._path(key)
        if if_absent and path.exists():
            raise self._refused(key)  # saves writing it all; the link below is what decides
        temporary = self._temporary / uuid.uuid4().hex
        try:
            stat = self._write_temporary(temporary, write)
            self._give_name(temporary, path, if_absent)
        except FileExistsError:
            raise self._refused(key) from None
        except OSError as error:
            raise self._fault(error, f"write {key}") from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        return _info(key, stat)

    def _refused(self, key: str) -> PreconditionFailed:
        return PreconditionFailed(f"There is already an object {key} in {self.url}.")

    def _write_temporary(self, temporary: Path, write: Callable[[BinaryIO], None]) -> os.stat_result:
        _make_folder(self._temporary)
        with temporary.open("xb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
            return os.fstat(out.fileno())

    def _give_name(self, temporary: Path, path: Path, if_absent: bool) -> None:
        for attempt in range(20):
            try:
                _make_folder(path.parent)
                if if_absent:
                    os.link(temporary, path)
                else:
                    temporary.replace(path)
            except FileNotFoundError:
                # A delete elsewhere just dropped the folder because it was empty.
                if attempt == 19 or not temporary.exists():
                    raise
            else:
                _sync_folder(path.parent)
                return

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        for name in self._entries(folder):
            key = folder + name
            if name.endswith("/"):
                if key.startswith(prefix) or prefix.startswith(key):
                    yield from self._walk(key, prefix)
            elif key.startswith(prefix):
                with suppress(FileNotFoundError):
                    yield _info(key, (self._root / key).stat())

    def _entries(self, folder: str) -> Sequence[str]:
        """Files as `name`, folders as `name/`, sorted."""
        try:
            with os.scandir(self._root / folder) as found:
                names = [e.name + "/" if e.is_dir() else e.name for e in found if e.is_dir() or e.is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._fault(error, f"list {folder}") from error
        return sorted(n for n in names if folder or n != TEMPORARY + "/")

    def _drop_empty(self, folder: Path) -> None:
        with suppress(OSError):  # not empty, or already gone
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent

    def _sweep_leftovers(self) -> None:
        """Removes what killed writers left a day ago; a younger file may belong to somebody alive."""
        with suppress(OSError):
            for path in self._temporary.iterdir():
                if time.time() - path.stat().st_mtime > LEFTOVER_AGE_S:
                    path.unlink(missing_ok=True)

    def _fault(self, error: OSError, action: str) -> StorageError:
        where = f"Could not {action} in {self._root}"
        if error.errno in DISK_FULL:
            return DiskFull(
                f"{where}: the disk is full; free some space, and the job goes on from what it has."
            )
        if error.errno in (errno.EACCES, errno.EROFS):
            return StorageError(f"{where}: no permission; check who owns the folder or choose another.")
        if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
            return StorageError(f"{where}: a file is where a folder should be; choose another folder.")
        if error.errno in _NO_LINKS:
            return StorageError(
                f"{where}: its file system has no hard links, which commits need; choose another."
            )
        detail = error.strerror or type(error).__name__
        return StorageError(f"{where}: {detail}.", transient=error.errno in (errno.EIO, errno.ESTALE))


def _write_all(out: BinaryIO, chunks: Iterable[bytes]) -> None:
    out.writelines(chunks)


def _info(key: str, stat: os.stat_result) -> ObjectInfo:
    # The inode tells two writes within one tick of the clock apart: every publish makes a new file.
    etag = f"{stat.st_mtime_ns:x}-{stat.st_size:x}-{stat.st_ino:x}"
    return ObjectInfo(key, stat.st_size, etag, stat.st_mtime)


def _make_folder(folder: Path) -> None:
    """mkdir -p that syncs the parent of each new folder: an unsynced one can vanish with all inside.

    Raises NotADirectoryError where a file is in the way; a FileExistsError would read as a taken name.
    """
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        try:
            mode = folder.stat().st_mode
        except FileNotFoundError:
            return  # dropped again since; whoever needs it finds out and asks once more
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
    else:
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
