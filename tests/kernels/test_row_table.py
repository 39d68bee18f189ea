"""Rows on the device: what a step derives from them is what the host would have sent."""

from __future__ import annotations

import torch

from pagemill.kernels import sample
from pagemill.kernels.row_table import DecodeInputs, RowTable, advance, decode_inputs


def table_of(rows: list[list[int]], seeds: list[int]) -> RowTable:
    """A slot a row of tokens, all computed but the last; block b of row r is 100 * r + b."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    noise = [sample.noise_base(seed, 2) for seed in seeds]
    return RowTable(
        lengths,
        lengths - 1,
        torch.tensor([row[-1] for row in rows], dtype=torch.int32),
        torch.arange(4, dtype=torch.int32)[None] + 100 * torch.arange(len(rows), dtype=torch.int32)[:, None],
        torch.tensor([base - (1 << 64) if base >> 63 else base for base in noise], dtype=torch.int64),
    )


def test_a_step_reads_the_last_token_its_place_and_its_noise() -> None:
    rows, seeds = [[5], list(range(16)), list(range(17)), list(range(40))], [0, 1, 2**64 - 1, 7]
    table = table_of(rows, seeds)
    out = DecodeInputs.empty(5, torch.device("cpu"))
    decode_inputs(table, torch.tensor([3, 0, -1, 1, 2]), 99, out)
    assert out.token_ids.tolist() == [39, 5, 0, 15, 16]
    assert out.positions.tolist() == [39, 0, 0, 15, 16]
    assert out.blocks.tolist() == [302, 0, 99, 100, 201]
    assert out.offsets.tolist() == [7, 0, 0, 15, 0]
    assert out.lengths.tolist() == [40, 1, 1, 16, 17]
    keys = sample.noise_keys([seeds[i] for i in (3, 0, 1, 2)], [2] * 4, [40, 1, 16, 17])
    assert torch.equal(out.keys[[0, 1, 3, 4]], keys)


def test_a_drawn_token_is_the_next_ones_input() -> None:
    table = table_of([[5, 6], [7] * 16, [8, 9, 10]], [0, 1, 2])
    slots = torch.tensor([1, -1, 0])
    advance(table, slots, torch.tensor([70, 71, 72]))
    assert table.lengths.tolist() == [3, 17, 3]
    assert table.computed.tolist() == [2, 16, 2]
    assert table.last.tolist() == [72, 70, 10]
    out = DecodeInputs.empty(3, torch.device("cpu"))
    decode_inputs(table, slots, 99, out)
    assert out.token_ids.tolist() == [70, 0, 72]
    assert out.blocks.tolist() == [101, 99, 0]
