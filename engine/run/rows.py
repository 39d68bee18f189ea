"""Turns a Batch into the decoder's packed inputs.

Knows sequences and block tables; it may not know weights or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagemill.engine.batch import Batch
from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.config import BLOCK_SIZE
from pagemill.engine.models.decoder import Inputs
from pagemill.kernels.attention import plan_rows


@dataclass(frozen=True, slots=True)
class StepRows:
    """inputs: for the decoder. starts: where each sequence's tokens begin in the packed matrix, and the end.

    sampling: which sequences sample this step. last_tokens: the packed place of the last token of each.
    """

    inputs: Inputs
    starts: tuple[int, ...]
    sampling: tuple[int, ...]
    last_tokens: torch.Tensor


def build_rows(batch: Batch, storage: KVStorage, share_prefixes: bool = True) -> StepRows:
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    starts = [0]
    lengths = []
    for seq, begin, new in zip(batch.sequences, batch.starts, batch.num_scheduled, strict=True):
        end = begin + new
        token_ids += seq.token_ids[begin:end]
        positions += range(begin, end)
        table = seq.block_table
        if end > len(table) * BLOCK_SIZE:
            raise ValueError(f"row {seq.request.request_id} has {len(table)} blocks for {end} tokens")
        blocks += [table[position // BLOCK_SIZE] for position in range(begin, end)]
        lengths.append(end)
        starts.append(starts[-1] + new)
    tables = [seq.block_table for seq in batch.sequences]
    rows = plan_rows(batch.num_scheduled, lengths, tables, storage.layer(0), share_prefixes)
    device = storage.tensor.device
    where = torch.tensor(positions, device=device)
    place = torch.tensor(blocks, device=device)
    offsets = where % BLOCK_SIZE
    inputs = Inputs(
        torch.tensor(token_ids, device=device),
        where,
        place,
        offsets,
        place[offsets == 0],
        rows,
        _long_rope(batch, device),
    )
    sampling = tuple(i for i in range(len(batch.sequences)) if batch.samples(i))
    last_tokens = torch.tensor([starts[i + 1] - 1 for i in sampling], dtype=torch.int64, device=device)
    return StepRows(inputs, tuple(starts), sampling, last_tokens)


def _long_rope(batch: Batch, device: torch.device) -> torch.Tensor | None:
    """For each token whether its row has outgrown the original context; None where no row has."""
    rows = [seq.long_rope for seq in batch.sequences]
    if not any(rows):
        return None
    return torch.repeat_interleave(torch.tensor(rows), torch.tensor(batch.num_scheduled)).to(device)
