"""A file that appears whole or not at all: written beside its place under another name, and renamed at the
end.

This room may not know what is in it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from pagemill.jobs.errors import UsageError


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """The file to write into; it takes the place of `path` when the block ends well, and vanishes when it
    does not.

    A path that is no ordinary file (/dev/null, a pipe) is written directly. Raises UsageError where it cannot
    be made.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file.")
    if path.exists() and not path.is_file():
        with path.open("wb") as special:
            yield special
        return
    place = path.resolve()  # through a link, not over it
    try:
        handle, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror or error}.") from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield cast(BinaryIO, file)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # mkstemp's 0600 would surprise whoever shares the folder
        Path(name).replace(place)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
