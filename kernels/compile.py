"""Compiles every Triton kernel's canonical variants ahead of time, and reports what each needs of a card.

    python -m pagemill.kernels.compile --json FILE [--only REGEX]

No card is needed. FILE is a list with, for each variant and target: kernel, variant, target, registers (a
thread), spills and shared_memory (bytes), how many instructions of each kind multiply matrices: mma
(mma.sync, any card), wgmma (Hopper), tcgen05 (Blackwell), and a digest of what was compiled. Exits with 1 if
a variant does not compile, spills registers, needs more shared memory than the card has or does without
wgmma where it must have it.

The list for Triton TRITON is kept beside this file, as compiled.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pagemill.kernels.device_source import digest
from pagemill.kernels.variants import FP_FUSION, Variant

# Another version gives other registers.
TRITON = "3.7.1"

# Bytes a thread block may have, by compute capability times ten (CUDA C++ Programming Guide, table of
# technical specifications).
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}

Row = dict[str, Any]


def all_variants() -> list[Variant]:
    """Those of every file `*_triton.py`, by name."""
    found: list[Variant] = []
    for path in sorted(Path(__file__).parent.glob("*_triton.py")):
        module = importlib.import_module(f"pagemill.kernels.{path.stem}")
        found += module.variants()
    found.sort(key=lambda variant: variant.full_name)
    names = [variant.full_name for variant in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two variants are called {', '.join(sorted(twice))}")
    return found


def compile_variant(variant: Variant, target: int) -> Row:
    """One row of the table. Raises whatever Triton raises where the variant does not compile."""
    # Here and not above: whether kernels are interpreted is settled when Triton is imported.
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: kind.partition(":")[0] for name, kind in variant.signature.items()}
    signature |= dict.fromkeys(variant.constexprs, "constexpr")
    names = variant.kernel.arg_names
    unknown = set(signature) ^ set(names)
    if unknown:
        raise ValueError(f"{variant.full_name} names other arguments than its kernel: {sorted(unknown)}")
    divisible = [name for name, kind in variant.signature.items() if kind.endswith(":16")]
    source = ASTSource(
        variant.kernel,
        {name: signature[name] for name in names},
        dict(variant.constexprs),
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": FP_FUSION,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    registers, spills = _resources(compiled.asm["cubin"])
    code = compiled.asm["ptx"]
    return {
        "kernel": variant.kernel.__name__,
        "variant": variant.name,
        "target": f"sm_{target}",
        "registers": registers,
        "spills": spills,
        "shared_memory": compiled.metadata.shared,
        "mma": len(re.findall(r"\bmma\.sync", code)),
        "wgmma": len(re.findall(r"\bwgmma\.mma_async", code)),
        "tcgen05": len(re.findall(r"\btcgen05\.mma", code)),
        "digest": digest(variant),
    }


def complaints(variant: Variant, row: Row) -> Iterator[str]:
    """What keeps a compiled variant from being good, in words."""
    name = f"{variant.full_name} on {row['target']}"
    if row["spills"]:
        yield f"{name} keeps {row['spills']} bytes a thread in memory for want of registers"
    most = SHARED_MEMORY[int(row["target"].removeprefix("sm_"))]
    if row["shared_memory"] > most:
        yield f"{name} needs {row['shared_memory']} bytes of shared memory, and the card has {most}"
    if variant.wgmma and row["target"] == "sm_90" and not row["wgmma"]:
        yield f"{name} does without wgmma"


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of the stack frame that those go to for which there is none."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (re.search(rf"\b{what}:(\d+)", text) for what in ("REG", "STACK", "LOCAL"))
    if registers is None or stack is None or local is None:
        raise ValueError(f"cuobjdump says nothing of registers: {text!r}")
    return int(registers[1]), int(stack[1]) + int(local[1])


def _chosen(pattern: str) -> Iterator[tuple[Variant, int]]:
    for variant in all_variants():
        for target in variant.targets:
            if re.search(pattern, f"{variant.full_name} sm_{target}"):
                yield variant, target


def as_json(rows: Sequence[Row]) -> str:
    """A line a row, so that a change shows as the lines it changes."""
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pagemill.kernels.compile")
    parser.add_argument("--json", type=Path, metavar="FILE", required=True)
    parser.add_argument("--only", default="", metavar="REGEX", help="found in 'kernel/variant sm_90'")
    options = parser.parse_args(arguments)
    # Interpreted kernels cannot be compiled; a shell in which tests are run may ask for them.
    os.environ.pop("TRITON_INTERPRET", None)
    import triton

    rows: list[Row] = []
    wrong: list[str] = []
    if triton.__version__ != TRITON:
        print(f"Triton {triton.__version__} gives other registers than {TRITON}", file=sys.stderr)
    for variant, target in _chosen(options.only):
        try:
            row = compile_variant(variant, target)
        except Exception as error:
            wrong.append(f"{variant.full_name} does not compile for sm_{target}: {error}")
            print(wrong[-1], file=sys.stderr)
            continue
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        rows.append(row)
        wrong += complaints(variant, row)
    options.json.write_text(as_json(rows))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
