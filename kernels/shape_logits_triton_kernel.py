"""Penalties, bias and held-back ends in Triton, for shape_logits.py: a pass over the rows that have any."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

IN_PROMPT: tl.constexpr = tl.constexpr(1 << 30)


@triton.jit
def shape_logits_kernel(
    logits,
    slots,
    counts,
    presence,
    frequency,
    repetition,
    bias_tokens,
    bias,
    ends,
    min_tokens,
    outputs,
    stride,
    vocabulary,
    biases,
    end_count,
    CHUNK: tl.constexpr,
    BIASES: tl.constexpr,
    ENDS: tl.constexpr,
):
    """Program (row, part): what shapes the row's logits in a part of CHUNK tokens."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * CHUNK
    slot = tl.load(slots + row)
    line = logits + row * stride
    if slot >= 0:
        once, each, times = tl.load(presence + slot), tl.load(frequency + slot), tl.load(repetition + slot)
        if (once != 0) | (each != 0) | (times != 1):
            at = begin + tl.arange(0, CHUNK)
            inside = at < vocabulary
            x = tl.load(line + at, mask=inside, other=0.0)
            count = tl.load(counts + slot * vocabulary + at, mask=inside, other=0)
            factor = tl.where(count > 0, times, 1.0)
            x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
            output = count & (IN_PROMPT - 1)
            x -= tl.where(output > 0, once, 0.0)
            x -= output.to(tl.float32) * each
            tl.store(line + at, x, mask=inside)
            # Bias is added to what another thread has put.
            tl.debug_barrier()
        i = tl.arange(0, BIASES)
        token = tl.load(bias_tokens + slot * biases + i, mask=i < biases, other=-1)
        # Each token lies in one part, and its program alone changes it.
        mine = (token >= begin) & (token < begin + CHUNK)
        value = tl.load(line + token, mask=mine, other=0.0)
        value += tl.load(bias + slot * biases + i, mask=mine, other=0.0)
        tl.store(line + token, value, mask=mine)
        if tl.load(outputs + slot) < tl.load(min_tokens + slot):
            tl.debug_barrier()
            j = tl.arange(0, ENDS)
            end = tl.load(ends + slot * end_count + j, mask=j < end_count, other=-1)
            held = (end >= begin) & (end < begin + CHUNK)
            tl.store(line + end, tl.full((ENDS,), float("-inf"), tl.float32), mask=held)
