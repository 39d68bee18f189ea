"""Where the command `pagemill` begins: nothing is loaded yet that takes time, so that Ctrl-C is met at once.

The commands are in commands.py, whose libraries take half a second to load. This room may not know them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code. Never raises."""
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
