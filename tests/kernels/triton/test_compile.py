"""The command that compiles Triton kernels for cards that are not there, and the table it made of them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import triton

from pagemill.kernels import compiled
from pagemill.kernels.compile import TRITON, Row, all_variants, as_json, complaints
from pagemill.kernels.device_source import digest
from pagemill.kernels.variants import Variant

VARIANTS = {variant.full_name: variant for variant in all_variants()}
TABLE = {(f"{row['kernel']}/{row['variant']}", row["target"]): row for row in compiled.rows()}
TILES = VARIANTS["attend_tiles/bf16-d128-g4-m128n64"]
GOOD: Row = {"target": "sm_90", "registers": 200, "spills": 0, "shared_memory": 227 << 10, "wgmma": 8}


def recompiled(tmp_path: Path, only: str) -> list[Row]:
    """What the command writes, without anything that it has compiled before; it has found no fault."""
    rows = tmp_path / "rows.json"
    command = [sys.executable, "-m", "pagemill.kernels.compile", "--json", str(rows), "--only", only]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run(command, check=True, env=environment)
    found: list[Row] = json.loads(rows.read_text())
    return found


def test_variants_name_every_argument_of_their_kernels() -> None:
    for variant in VARIANTS.values():
        assert {*variant.signature, *variant.constexprs} == set(variant.kernel.arg_names), variant.full_name


def test_the_table_has_each_variant_once_for_each_of_its_cards() -> None:
    expected = [(name, f"sm_{target}") for name, variant in VARIANTS.items() for target in variant.targets]
    assert list(TABLE) == expected
    assert len(compiled.rows()) == len(expected)
    assert compiled.TABLE.read_text() == as_json(compiled.rows())


def test_the_table_is_of_the_kernels_as_they_are() -> None:
    """Where this fails: python -m pagemill.kernels.compile --json kernels/compiled.json"""
    now = {name: digest(variant) for name, variant in VARIANTS.items()}
    assert [name for (name, _), row in TABLE.items() if row["digest"] != now[name]] == []


def test_nothing_in_the_table_is_complained_of() -> None:
    assert [said for (name, _), row in TABLE.items() for said in complaints(VARIANTS[name], row)] == []


def test_prefill_of_16_bits_has_the_matrix_unit_of_each_card() -> None:
    """And nothing else, which would be a part of it that a card's older instruction does."""
    units = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}
    found = {
        (card, tuple(unit for unit in compiled.INSTRUCTIONS if row[unit]))
        for (name, card), row in TABLE.items()
        if name.startswith(("attend_tiles/bf16", "attend_tiles/fp16"))
    }
    assert found == {(card, (unit,)) for card, unit in units.items()}


def test_the_readme_shows_the_table_in_short() -> None:
    assert compiled.summary(compiled.rows()) in compiled.TABLE.with_name("README.md").read_text()


# One of each kind of kernel that is heavy, and each card.
SAMPLE = [
    ("attend_splits/bf16-d128-g4-m16n64", "sm_80"),
    ("attend_tiles/bf16-d128-g4-m128n64", "sm_90"),
    ("multiply_kernel/fp8e4nv-m64", "sm_100"),
    ("rope_write_kernel/bf16-d128-norm", "sm_80"),
]


def test_some_variants_compile_to_their_lines_of_the_table(tmp_path: Path) -> None:
    found = recompiled(tmp_path, "|".join(f"^{name} {card}$" for name, card in SAMPLE))
    assert [(f"{row['kernel']}/{row['variant']}", row["target"]) for row in found] == SAMPLE
    # Another version gives other registers, but no fault.
    if triton.__version__ == TRITON:
        assert found == [TABLE[place] for place in SAMPLE]


def test_a_variant_that_spills_or_asks_too_much_is_complained_of() -> None:
    def said(variant: Variant = TILES, **other: object) -> int:
        return len(list(complaints(variant, {**GOOD, **other})))

    assert said() == 0
    assert said(spills=8) == 1
    assert said(shared_memory=(227 << 10) + 1) == 1
    assert said(target="sm_80") == 1
    assert said(wgmma=0) == 1
    assert said(wgmma=0, target="sm_100") == 0
    assert said(dataclasses.replace(TILES, wgmma=False), wgmma=0) == 0
