"""A folder for temporary files that does not outlive its owner for long, even one that was killed.

This room knows folders and locks. It may not know what is kept in them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "pagemill-scratch-"
_LOCK: Final = "lock"
YOUNG_S: Final = 60.0
"""A folder without a lock is being made, or was left so by somebody who died at it; then it is older."""


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A fresh folder in `parent` (default: the system's place for such), removed at the end.

    First removes those of owners that died: each live one holds a lock, which the system lets go of when
    a process ends in whatever way. Age would not do, since planning may take hours.
    """
    base = Path(tempfile.gettempdir()) if parent is None else parent
    base.mkdir(parents=True, exist_ok=True)
    _sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    lock = _locked(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(folder: Path) -> int:
    """Lock first, name after: a sweeper that finds the name finds it locked."""
    unnamed = folder / f"{_LOCK}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    unnamed.rename(folder / _LOCK)
    return descriptor


def _sweep(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody else's folder, or somebody else is sweeping it
            if _abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _abandoned(folder: Path) -> bool:
    return not (folder / _LOCK).exists() and folder.stat().st_mtime < time.time() - YOUNG_S
