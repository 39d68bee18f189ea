"""Shaping from kept tables against the functions that start from a row's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill.kernels import sample
from pagemill.kernels.shape_logits import IN_PROMPT, Shaping, count_drawn, shape_logits


def random_shaping(slots: int, vocabulary: int) -> Shaping:
    """Slots 0 and 3 have no penalties, slot 1 no bias, slot 2 has reached its least length."""
    output = torch.randint(-3, 4, (slots, vocabulary), dtype=torch.int32).clamp(min=0)
    prompt = torch.randint(0, 2, (slots, vocabulary), dtype=torch.int32)
    off = torch.tensor([i not in (0, 3) for i in range(slots)])
    bias_tokens = torch.stack([torch.randperm(vocabulary)[:5] for _ in range(slots)]).to(torch.int32)
    bias_tokens[:, 3:] = -1
    bias_tokens[1] = -1
    ends = torch.stack([torch.randperm(vocabulary)[:3] for _ in range(slots)]).to(torch.int32)
    ends[:, 1] = -1
    # One that is biased is held back too.
    ends[0, 0] = bias_tokens[0, 0]
    outputs = torch.arange(slots, dtype=torch.int32)
    return Shaping(
        output + prompt * IN_PROMPT,
        torch.rand(slots) * off,
        torch.rand(slots) * off,
        torch.where(off, 1 + torch.rand(slots), 1.0),
        bias_tokens,
        torch.randn(slots, 5),
        ends,
        torch.tensor([outputs[i] + (i != 2) for i in range(slots)], dtype=torch.int32),
        outputs,
    )


def by_tokens(logits: Tensor, slots: list[int], shaping: Shaping) -> Tensor:
    """The same by sample.apply_penalties and plain loops."""
    expected = logits.clone()
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        counts = shaping.counts[slot : slot + 1]
        factors = (f[slot : slot + 1] for f in (shaping.presence, shaping.frequency, shaping.repetition))
        one = expected[row : row + 1]
        sample.apply_penalties(one, (counts >= IN_PROMPT).float(), (counts % IN_PROMPT).float(), *factors)
        for token, value in zip(shaping.bias_tokens[slot].tolist(), shaping.bias[slot].tolist(), strict=True):
            if token >= 0:
                expected[row, token] += value
        if shaping.outputs[slot] < shaping.min_tokens[slot]:
            for token in shaping.ends[slot].tolist():
                if token >= 0:
                    expected[row, token] = -torch.inf
    return expected


def test_tables_shape_as_penalties_bias_and_bans_do() -> None:
    logits, shaping, slots = torch.randn(5, 40), random_shaping(6, 40), [3, -1, 0, 2, 1]
    expected = by_tokens(logits, slots, shaping)
    shape_logits(logits, torch.tensor(slots), shaping)
    torch.testing.assert_close(logits, expected)


def test_drawn_tokens_are_counted_in_their_slots_alone() -> None:
    shaping = random_shaping(4, 10)
    before, outputs = shaping.counts.clone(), shaping.outputs.clone()
    count_drawn(shaping, torch.tensor([2, -1, 0]), torch.tensor([7, 3, 7]))
    before[2, 7] += 1
    before[0, 7] += 1
    assert torch.equal(shaping.counts, before)
    assert (shaping.outputs - outputs).tolist() == [1, 0, 1, 0]
