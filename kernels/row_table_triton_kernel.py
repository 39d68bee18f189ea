"""Reading and advancing the rows that stay on the device, in Triton: for row_table.py."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_SIZE: tl.constexpr = tl.constexpr(16)


@triton.jit
def mix64(x):
    """sample.mix64 of uint64."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def decode_inputs_kernel(
    lengths,
    computed,
    last,
    blocks,
    noise,
    slots,
    token_ids,
    positions,
    places,
    offsets,
    read,
    keys,
    rows,
    table_width,
    spare,
    BLOCK: tl.constexpr,
):
    """Programs of BLOCK rows; the outputs of row_table.DecodeInputs in order, `read` its lengths."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=-1)
    there = slot >= 0
    position = tl.load(computed + slot, mask=there, other=0).to(tl.int64)
    token = tl.load(last + slot, mask=there, other=0).to(tl.int64)
    # The slot -1 is line 0 in the plain form too: what stands there is drawn for nobody.
    line = tl.maximum(slot, 0)
    base = tl.load(noise + line, mask=inside, other=0)
    length = tl.load(lengths + line, mask=inside, other=0).to(tl.int64)
    block = tl.load(blocks + slot * table_width + position // BLOCK_SIZE, mask=there, other=0)
    tl.store(token_ids + row, token, mask=inside)
    tl.store(positions + row, position, mask=inside)
    tl.store(places + row, tl.where(there, block, spare).to(tl.int64), mask=inside)
    tl.store(offsets + row, position % BLOCK_SIZE, mask=inside)
    tl.store(read + row, (position + 1).to(tl.int32), mask=inside)
    key = mix64((base ^ length).to(tl.uint64, bitcast=True))
    tl.store(keys + 2 * row, (key & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True), mask=inside)
    tl.store(keys + 2 * row + 1, (key >> 32).to(tl.uint32).to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def advance_kernel(lengths, computed, last, slots, tokens, rows, BLOCK: tl.constexpr):
    """Programs of BLOCK rows: the drawn token becomes the last, and the row one longer."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    there = slot >= 0
    token = tl.load(tokens + row, mask=there, other=0).to(tl.int32)
    tl.store(last + slot, token, mask=there)
    tl.store(computed + slot, tl.load(computed + slot, mask=there, other=0) + 1, mask=there)
    tl.store(lengths + slot, tl.load(lengths + slot, mask=there, other=0) + 1, mask=there)
