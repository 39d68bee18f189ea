"""The command; see `infra/gpu-check --help`.

Ends with 1 when anything is wrong or was not done, and with 0 otherwise, whatever the marks.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_check.house import named_rooms

BREAK = (
    "breaks what has NAME in its name, to see that it is found; KIND: wrong (one number is off) or unwritten "
    "(nothing is launched)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # torch then asks the driver's library whether there is a device, and does not touch it: start.py.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if options.dry_run:
        # Settled by the first import of Triton.
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with named_rooms():
        from gpu_check.command import check_this_machine

        return check_this_machine(options)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="infra/gpu-check", description="Checks kernels and the engine on a GPU, and measures both."
    )
    add = parser.add_argument
    add("--dry-run", action="store_true", help="everything on the CPU: tiny shapes, interpreted kernels")
    add("--part", action="append", default=[], help="only this one; may be repeated. All: --list")
    add("--only", default="", metavar="TEXT", help="only checks and figures with this in their name")
    add("--list", action="store_true", help="the parts, and what each may take")
    add("--json", type=Path, help="also write everything here")
    add("--seed", type=int, help="of the random data; a new one each time unless told")
    add("--break", dest="fault", metavar="NAME:KIND", help=BREAK)
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = secrets.randbelow(2**31)
    options.command = ["infra/gpu-check", *(sys.argv[1:] if arguments is None else arguments)]
    return options


if __name__ == "__main__":
    sys.exit(main())
