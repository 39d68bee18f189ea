"""The command that compiles Triton kernels for cards that are not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pagemill.kernels.compile import Row, all_variants, complaints

GOOD: Row = {
    "kernel": "attend_tiles",
    "variant": "bf16-d128-g4-m128",
    "target": "sm_80",
    "registers": 200,
    "spills": 0,
    "shared_memory": 163 << 10,
}


def test_variants_name_every_argument_of_their_kernels() -> None:
    variants = all_variants()
    assert {v.kernel.__name__ for v in variants} >= {"attend_splits", "attend_tiles", "combine_splits"}
    for variant in variants:
        assert {*variant.signature, *variant.constexprs} == set(variant.kernel.arg_names), variant.full_name


def test_a_variant_that_spills_or_asks_too_much_is_complained_of() -> None:
    assert list(complaints(GOOD)) == []
    assert len(list(complaints({**GOOD, "spills": 8}))) == 1
    assert len(list(complaints({**GOOD, "shared_memory": (163 << 10) + 1}))) == 1


def test_a_variant_that_does_not_exist_makes_an_empty_list(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pagemill.kernels.compile", "--json", str(tmp_path / "rows.json")]
    subprocess.run([*command, "--only", "nothing is called so"], check=True)
    assert json.loads((tmp_path / "rows.json").read_text()) == []
