"""Gives pagemill.kernels and pagemill.engine their names where nothing is installed: a folder of links."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("kernels", "engine")


@contextmanager
def named_rooms() -> Iterator[Path]:
    """While it lasts the rooms of this checkout are imported, whatever is installed under their names."""
    with tempfile.TemporaryDirectory(prefix="pagemill-") as folder:
        package = Path(folder) / "pagemill"
        package.mkdir()
        for room in ROOMS:
            (package / room).symlink_to(ROOT / room, target_is_directory=True)
        sys.path.insert(0, folder)
        try:
            yield package
        finally:
            sys.path.remove(folder)
