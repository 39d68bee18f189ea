"""Row tables in Triton against their torch form."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from pagemill.kernels import row_table_triton
from pagemill.kernels.row_table import DecodeInputs, RowTable, advance_torch, decode_inputs_torch

pytestmark = pytest.mark.usefixtures("poisoned")


def random_table(device: torch.device, slots: int, blocks: int) -> RowTable:
    computed = torch.randint(0, blocks * 16, (slots,), dtype=torch.int32, device=device)
    return RowTable(
        computed + 1,
        computed,
        torch.randint(0, 2**18, (slots,), dtype=torch.int32, device=device),
        torch.randint(0, 2**20, (slots, blocks), dtype=torch.int32, device=device),
        torch.randint(-(2**62), 2**62, (slots,), device=device) * 2 + 1,
    )


def same(found: object, expected: object, kind: type) -> None:
    for field in fields(kind):
        torch.testing.assert_close(getattr(found, field.name), getattr(expected, field.name), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [0, 1, 129])
def test_inputs_are_those_of_the_torch_form(device: torch.device, rows: int) -> None:
    table = random_table(device, 200, 5)
    slots = torch.randperm(200, device=device)[:rows]
    slots[::3] = -1
    found, expected = DecodeInputs.empty(rows, device), DecodeInputs.empty(rows, device)
    row_table_triton.decode_inputs(table, slots, 4321, found)
    decode_inputs_torch(table, slots, 4321, expected)
    same(found, expected, DecodeInputs)


@pytest.mark.usefixtures("fresh")
def test_fresh_numbers_each_time(device: torch.device) -> None:
    test_inputs_are_those_of_the_torch_form(device, int(torch.randint(1, 200, ())))
    test_advancing_changes_the_rows_of_the_step_alone(device, int(torch.randint(1, 200, ())))


@pytest.mark.parametrize("rows", [0, 1, 129])
def test_advancing_changes_the_rows_of_the_step_alone(device: torch.device, rows: int) -> None:
    found = random_table(device, 200, 2)
    expected = RowTable(*(getattr(found, field.name).clone() for field in fields(RowTable)))
    slots, tokens = torch.randperm(200, device=device)[:rows], torch.randint(0, 2**18, (rows,), device=device)
    slots[1::3] = -1
    row_table_triton.advance(found, slots, tokens)
    advance_torch(expected, slots, tokens)
    same(found, expected, RowTable)
