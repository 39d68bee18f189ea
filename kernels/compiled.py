"""The table of compiled Triton kernels that is kept beside this file, and a short form of it for readers.

    python -m pagemill.kernels.compiled

prints the short form, which stands in README.md. Needs neither Triton nor torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

TABLE = Path(__file__).with_name("compiled.json")
CARDS = ("sm_80", "sm_90", "sm_100")
INSTRUCTIONS = ("mma", "wgmma", "tcgen05")


def rows() -> list[Row]:
    """As compile.py describes them."""
    found: list[Row] = json.loads(TABLE.read_text())
    return found


def summary(table: Sequence[Row]) -> str:
    """A line a kernel and dtype, in Markdown: of its variants the most of each, on each card."""
    lines = [
        "| kernel | variants | registers | shared memory, KiB | products of matrices by |",
        "|---|---|---|---|---|",
    ]
    kinds: dict[str, list[Row]] = {}
    for row in table:
        kinds.setdefault(_kind(row), []).append(row)
    for kind, found in sorted(kinds.items(), key=_by_number):
        variants = len({row["variant"] for row in found})
        by_card = [[row for row in found if row["target"] == card] for card in CARDS]
        registers = " · ".join(str(max((r["registers"] for r in card), default="–")) for card in by_card)
        shared = " · ".join(_kib(card) for card in by_card)
        products = " · ".join(_products(card) for card in by_card)
        lines.append(f"| {kind} | {variants} | {registers} | {shared} | {products} |")
    return "\n".join(lines)


def _kind(row: Row) -> str:
    """Kernels that multiply matrices are told apart by dtype, and by rows of a tile where that tells."""
    name, variant = row["kernel"], row["variant"].split("-")
    if name in ("attend_splits", "attend_tiles"):
        dtype = "fp32" if variant[0] == "fp32" else "16 bits"
        memory = ", memory of 8" if "kv" in variant else ""
        rows = next(int(part[1:].partition("n")[0]) for part in variant if part[0] == "m")
        tile = "" if name == "attend_tiles" else ", 16 rows" if rows == 16 else ", 32 or 64 rows"
        return f"`{name}` {dtype}{memory}{tile}"
    if name == "multiply_kernel":
        return f"`{name}` {variant[0]}, {variant[-1].removeprefix('m')} rows"
    return f"`{name}`"


def _by_number(item: tuple[str, Sequence[Row]]) -> list[tuple[str, int]]:
    """In the order of a reader: 16 before 128."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", item[0])]


def _kib(table: Sequence[Row]) -> str:
    return str(-(-max(row["shared_memory"] for row in table) // 1024)) if table else "–"


def _products(table: Sequence[Row]) -> str:
    """The kinds of instructions that any of them has."""
    if not table:
        return "–"
    return ", ".join(kind for kind in INSTRUCTIONS if any(row[kind] for row in table)) or "none"


if __name__ == "__main__":
    print(summary(rows()))
