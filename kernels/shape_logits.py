"""Penalties, logit bias and held-back ends of a decode step, from tables that stay on the device.

What sample.apply_penalties does from counts made anew, this does from counts that are kept: a line a slot, a
token added to them when it is drawn. It knows slots and tokens; not requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.kernels.choice import takes_triton

# Added to a count where the token occurs in the prompt.
IN_PROMPT = 1 << 30


@dataclass(frozen=True, slots=True)
class Shaping:
    """What shapes the logits of the row in each slot; lists are filled up with -1, no id twice in a list.

    counts: int32 [slots, vocabulary], how often a token came in the output, plus IN_PROMPT if it is in the
    prompt. presence, frequency, repetition: float32 [slots], off at 0, 0 and 1. bias_tokens: int32 [slots,
    n], bias: float32 [slots, n], added. ends: int32 [slots, m], tokens that may not come while outputs <
    min_tokens, int32 [slots] both. Ids of bias and ends lie within the vocabulary.
    """

    counts: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    bias_tokens: Tensor
    bias: Tensor
    ends: Tensor
    min_tokens: Tensor
    outputs: Tensor


def shape_logits(logits: Tensor, slots: Tensor, shaping: Shaping) -> None:
    """Penalties, then bias, then the ban on ending early, in place; logits float32 [rows, vocabulary].

    slots: int64 [rows], no slot twice; a row with -1 is left alone.
    """
    if takes_triton(logits):
        from pagemill.kernels import shape_logits_triton

        shape_logits_triton.shape_logits(logits, slots, shaping)
    else:
        shape_logits_torch(logits, slots, shaping)


def shape_logits_torch(logits: Tensor, slots: Tensor, shaping: Shaping) -> None:
    """The plain form: a row after the other."""
    for row, slot in zip(logits, slots.tolist(), strict=True):
        if slot < 0:
            continue
        counts = shaping.counts[slot]
        output = counts & (IN_PROMPT - 1)
        repetition = torch.where(counts > 0, shaping.repetition[slot], 1.0)
        row.copy_(torch.where(row > 0, row / repetition, row * repetition))
        row.sub_((output > 0) * shaping.presence[slot])
        row.sub_(output * shaping.frequency[slot])
        biased = shaping.bias_tokens[slot] >= 0
        row[shaping.bias_tokens[slot][biased].long()] += shaping.bias[slot][biased]
        if shaping.outputs[slot] < shaping.min_tokens[slot]:
            ends = shaping.ends[slot]
            row[ends[ends >= 0].long()] = -torch.inf


def count_drawn(shaping: Shaping, slots: Tensor, tokens: Tensor) -> None:
    """Adds the token drawn in each row, int64 [rows], to its slot's counts; a slot of -1 is none."""
    # What is added for rows without a slot is 0, and where it is added then does not matter.
    drawn = (slots >= 0).to(torch.int32)
    lines = slots.clamp(min=0)
    shaping.counts.index_put_((lines, tokens), drawn, accumulate=True)
    shaping.outputs.index_add_(0, lines, drawn)
