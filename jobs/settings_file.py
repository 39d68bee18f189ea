"""Settings from a TOML file: what every machine of a fleet has in common, written once.

    redis_url = "rediss://redis:6379/0"        # PAGEMILL_REDIS_URL, and so on
    store = "s3://bucket/prefix"

    [worker]                                   # what only workers read
    models = ["llama=/models/llama"]

PAGEMILL_CONFIG names the file, else ~/.pagemill/config.toml is read where it exists. Never one of the working
directory: a folder that somebody sent must not choose where prompts go. This room may not know what the
settings mean.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pagemill.jobs.errors import UsageError

VARIABLE: Final = "PAGEMILL_CONFIG"
TABLE: Final = "worker"


def config_path(env: Mapping[str, str] = os.environ) -> Path | None:
    """The file that is read, None where there is none. Raises UsageError where a named one is not there."""
    named = env.get(VARIABLE)
    if named:
        path = Path(named)
        if not path.is_file():
            raise UsageError(f"{VARIABLE} names {named}, which is no file: correct it or unset it.")
        return path
    try:
        usual = Path.home() / ".pagemill" / "config.toml"
    except RuntimeError:  # a container's user that no passwd file knows
        return None
    return usual if usual.is_file() else None


def read_config(common: set[str], workers: set[str] | None) -> dict[str, Any]:
    """The settings in the file. common: names at its top; workers: names in [worker], None where a client
    reads it, which skips that table. Raises UsageError for a name that nobody reads."""
    path = config_path()
    if path is None:
        return {}
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path} cannot be read: {said}.") from None
    table = document.pop(TABLE, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {TABLE} is a table: write [{TABLE}] and its settings below.")
    _check(path, "", document, common)
    if workers is None:
        return document
    _check(path, f"[{TABLE}] ", table, workers)
    return document | table


def _check(path: Path, where: str, found: Mapping[str, Any], known: set[str]) -> None:
    for name in found:
        if name not in known:
            raise UsageError(
                f"{path}: {where}{name} is no setting here; there are {', '.join(sorted(known))}."
            )
