"""What Triton kernels need of a card: the committed table has all of them, none spills, and a sample of them
is compiled anew and needs the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill.kernels.compile import Row, all_variants, complaints

TABLE = Path(__file__).resolve().parents[3] / "infra" / "bench" / "results" / "kernels-resources.json"
# The kernels whose cost is the cost of a step, each for one card.
SAMPLE = {
    80: ["attend_splits/bf16-d64-g3-m16"],
    90: ["attend_tiles/bf16-d128-g4-m128", "attend_splits/bf16-d128-g4-m64", "combine_splits/bf16-d128"],
    100: ["attend_splits/bf16-d128-g4-m16"],
}


@pytest.fixture(scope="module")
def table() -> list[Row]:
    rows: list[Row] = json.loads(TABLE.read_text())
    return rows


def key(row: Row) -> tuple[str, str]:
    return f"{row['kernel']}/{row['variant']}", row["target"]


def test_the_table_has_every_variant_for_every_card(table: list[Row]) -> None:
    wanted = [(v.full_name, f"sm_{target}") for v in all_variants() for target in v.targets]
    assert sorted(map(key, table)) == sorted(wanted)


def test_no_variant_spills_or_needs_more_than_a_card_has(table: list[Row]) -> None:
    assert [line for row in table for line in complaints(row)] == []


def test_a_variant_that_spills_would_be_found_out(table: list[Row]) -> None:
    assert len(list(complaints({**table[0], "spills": 8, "shared_memory": 1 << 20}))) == 2


def test_runs_of_tokens_in_16_bits_use_the_matrix_unit_of_their_card(table: list[Row]) -> None:
    tiles = [r for r in table if r["kernel"] == "attend_tiles" and not r["variant"].startswith("fp32")]
    assert tiles
    for row in tiles:
        unit = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}[row["target"]]
        assert row[unit] > 0, row


def test_one_row_s_splits_use_the_matrix_unit_of_any_card(table: list[Row]) -> None:
    splits = [r for r in table if r["kernel"] == "attend_splits" and r["variant"].startswith("bf16-d")]
    assert splits
    assert all(r["mma"] + r["wgmma"] + r["tcgen05"] > 0 for r in splits)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", SAMPLE)
def test_compiled_anew_a_variant_needs_what_the_table_says(
    target: int, table: list[Row], tmp_path: Path
) -> None:
    """In a process of its own, since kernels of this one are interpreted."""
    only = "^(" + "|".join(SAMPLE[target]) + ")$"
    command = [sys.executable, "-m", "pagemill.kernels.compile", "--json", str(tmp_path / "rows.json")]
    command += ["--only", only, "--target", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == len(SAMPLE[target])
    known = {key(row): row for row in table}
    assert rows == [known[key(row)] for row in rows]


def test_a_variant_that_does_not_exist_makes_an_empty_list(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pagemill.kernels.compile", "--json", str(tmp_path / "rows.json")]
    subprocess.run([*command, "--only", "nothing is called so"], check=True)
    assert json.loads((tmp_path / "rows.json").read_text()) == []
