"""Where the command `pagemill` begins: nothing is loaded yet that takes time, so that Ctrl-C is met at once.

The commands are in commands.py, whose libraries take half a second to load. This room may not know them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code. Never raises."""
    _open_what_is_closed()
    try:
        from pagemill.jobs.commands import run_program

        return run_program(arguments)
    except KeyboardInterrupt:
        print("pagemill: Interrupted.", file=sys.stderr)
        return 130
    except ImportError as error:
        print(
            f"pagemill: This installation is broken ({error}): pip install --upgrade pagemill.",
            file=sys.stderr,
        )
        return 1


def _open_what_is_closed() -> None:
    """Standard streams that our caller closed lead nowhere, rather than into the next file that is opened."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this one
    # They live as long as the program, so nobody closes them.
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
