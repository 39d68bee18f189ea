"""Gated activations in Triton: a program for a stretch of one token's width."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_kernel(gate_up, out, stride, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """out [tokens, width] = activation(gate) * up, the activation rounded before it multiplies."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    narrow = tl.load(gate_up + token * stride + at, mask=inside, other=0.0)
    up = tl.load(gate_up + token * stride + width + at, mask=inside, other=0.0).to(tl.float32)
    gate = narrow.to(tl.float32)
    # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u)), which loses nothing where tanh nears -1.
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    active = (gate / (1.0 + tl.exp(-inner))).to(narrow.dtype).to(tl.float32)
    tl.store(out + token * width + at, (active * up).to(narrow.dtype), mask=inside)
