"""Paged attention in Triton: device code, which knows addresses and integers alone.

Online softmax over tiles of keys (FlashAttention-2, Dao 2023), the query heads of a kv head packed as rows of
one tile. Two kernels attend: `attend_splits` does rows of one token, a fixed number of keys at a time
(FlashDecoding), for one row or for several that have those keys in common (Hydragen, Juravsky et al. 2024);
`attend_tiles` does runs of tokens. `combine_splits` puts the parts of a row together. The records that they
read are described in attention_triton_plan.py, the layout of a block in cache_write.py.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

# Words of a record; see attention_triton_plan.py.
ITEM_WORDS = tl.constexpr(4)
ROW_WORDS = tl.constexpr(8)
TILE_WORDS = tl.constexpr(4)
BLOCK = tl.constexpr(16)
# Parts that `combine_splits` takes at once.
TOGETHER = tl.constexpr(16)
# Weights are powers of two: exp2 is one instruction.
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    acc,
    total,
    most,
    q,
    first,
    past,
    low,
    begin,
    stop,
    table,
    keys,
    values,
    block_stride,
    key_scales,
    value_scales,
    scale_stride,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Goes on over keys [begin, stop), begin a multiple of N, and returns acc [M, D], total and most [M].

    Query m of q [M, D] sees keys [first[m], past[m]); no query sees keys below `low` or from `stop` on, and
    these are not read, but for the rest of a block of keys. Without MASKED all of them see all keys.
    """
    d = tl.arange(0, D)
    for start in range(begin, stop, N):
        token = start + tl.arange(0, N)
        # Masks of keys are the same for a whole block: tokens lie side by side there, and a mask that changed
        # among them would break up what is loaded at once.
        block_start = token // BLOCK * BLOCK
        if MASKED:
            block_seen = (block_start < stop) & (block_start + (BLOCK - 1) >= low)
            block = tl.load(table + token // BLOCK, mask=block_seen, other=0).to(tl.int64)
        else:
            block = tl.load(table + token // BLOCK).to(tl.int64)
        offset = token % BLOCK
        key_at = (block * block_stride)[None, :] + (d * BLOCK)[:, None] + offset[None, :]
        # What the compiler cannot see: the tokens of a block have one block id.
        key_at = tl.max_contiguous(tl.multiple_of(key_at, (1, 16)), (1, 16))
        value_at = (block * block_stride)[:, None] + (offset * HEAD_DIM)[:, None] + d[None, :]
        if MASKED:
            token_seen = (token < stop) & (token >= low)
            k = tl.load(keys + key_at, mask=block_seen[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
            # 0 * NaN is NaN: whatever lies behind a row's end must not be read as a value.
            v = tl.load(values + value_at, mask=token_seen[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        elif D == HEAD_DIM:
            k = tl.load(keys + key_at)
            v = tl.load(values + value_at)
        else:
            k = tl.load(keys + key_at, mask=(d < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(values + value_at, mask=(d < HEAD_DIM)[None, :], other=0.0)
        score = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if SCALED:
            scale_at = block * scale_stride + offset
            if MASKED:
                score *= tl.load(key_scales + scale_at, mask=token_seen, other=0.0)[None, :]
                value_scale = tl.load(value_scales + scale_at, mask=token_seen, other=0.0)
            else:
                score *= tl.load(key_scales + scale_at)[None, :]
                value_scale = tl.load(value_scales + scale_at)
            v = v.to(tl.float32) * value_scale[:, None]
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + exp(2x)), which neither end of the range breaks.
            score = softcap * LOG2E * (1.0 - 2.0 / (1.0 + tl.exp2(score * (scale / softcap * 2.0 * LOG2E))))
        else:
            score *= scale * LOG2E
        if MASKED:
            seen = (token[None, :] < past[:, None]) & (token[None, :] >= first[:, None])
            score = tl.where(seen, score, float("-inf"))
        new_most = tl.maximum(most, tl.max(score, 1))
        # Without a key that it sees a query has no most yet.
        base = tl.where(new_most == float("-inf"), 0.0, new_most) if MASKED else new_most
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(most - base)
        total = total * fade + tl.sum(weight, 1)
        acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
        most = new_most
    return acc, total, most


@triton.jit
def attend_splits(
    query,
    out,
    parts,
    part_totals,
    layer,
    scales,
    items,
    count,
    rows,
    tables,
    query_token,
    query_head,
    out_token,
    out_head,
    block_stride,
    kind_stride,
    head_stride,
    scale_stride,
    kv_heads,
    window,
    scale,
    softcap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Programs (any number, kv_heads). One split of one or more rows each; a row of one split goes to out
    [tokens, heads, HEAD_DIM], others to parts [parts, heads, HEAD_DIM] and part_totals [parts, heads], the
    latter as log2 of the sum of weights."""
    head = tl.program_id(1)
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    query_heads = head * GROUP + m % GROUP
    keys = layer + head * head_stride
    values = keys + kind_stride
    key_scales = scales
    value_scales = scales
    if SCALED:
        key_scales = scales + head * BLOCK
        value_scales = key_scales + kv_heads * BLOCK
    # The number of programs may be that of a captured graph, and the number of items any.
    for item in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        first_row = tl.load(items + item * ITEM_WORDS)
        used = m // GROUP < tl.load(items + item * ITEM_WORDS + 1)
        split = tl.load(items + item * ITEM_WORDS + 2)
        row = rows + (first_row + m // GROUP) * ROW_WORDS
        token = tl.load(row, mask=used, other=0).to(tl.int64)
        length = tl.load(row + 1, mask=used, other=0)
        table = tables + tl.load(rows + first_row * ROW_WORDS + 2)
        first_split = tl.load(row + 3, mask=used, other=0)
        splits = tl.load(row + 4, mask=used, other=0)
        part = tl.load(row + 5, mask=used, other=0).to(tl.int64) + split - first_split

        first = tl.maximum(length - window, 0)
        past = tl.minimum(length, (split + 1) * SPLIT)
        low = tl.maximum(split * SPLIT, tl.min(tl.where(used, first, 0x7FFFFFFF), 0))
        q = tl.load(
            query + token[:, None] * query_token + query_heads[:, None] * query_head + d[None, :],
            mask=used[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        acc, total, most = _attend(
            tl.zeros([M, D], tl.float32),
            tl.zeros([M], tl.float32),
            tl.full([M], float("-inf"), tl.float32),
            q,
            first,
            past,
            low,
            low // N * N,
            tl.max(past, 0),
            table,
            keys,
            values,
            block_stride,
            key_scales,
            value_scales,
            scale_stride,
            scale,
            softcap,
            HEAD_DIM,
            D,
            N,
            True,
            SOFTCAP,
            SCALED,
        )
        empty = total == 0.0
        total = tl.where(empty, 1.0, total)
        acc = acc / total[:, None]
        mine = used & (split >= first_split) & (split < first_split + splits)
        inside = (d < HEAD_DIM)[None, :]
        tl.store(
            out + token[:, None] * out_token + query_heads[:, None] * out_head + d[None, :],
            acc.to(out.dtype.element_ty),
            mask=(mine & (splits == 1))[:, None] & inside,
        )
        place = part * (kv_heads * GROUP) + query_heads
        apart = mine & (splits > 1)
        tl.store(parts + place[:, None] * HEAD_DIM + d[None, :], acc, mask=apart[:, None] & inside)
        tl.store(part_totals + place, tl.where(empty, float("-inf"), most + tl.log2(total)), mask=apart)


@triton.jit
def combine_splits(
    out,
    parts,
    part_totals,
    rows,
    count,
    out_token,
    out_head,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Programs (rows or more, heads): out[token, head] of each row that has more parts than one, in the order
    of its keys."""
    row = tl.program_id(0)
    if row >= tl.load(count):
        return
    splits = tl.load(rows + row * ROW_WORDS + 4)
    if splits <= 1:
        return
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    token = tl.load(rows + row * ROW_WORDS).to(tl.int64)
    part = tl.load(rows + row * ROW_WORDS + 5).to(tl.int64)
    d = tl.arange(0, D)
    inside = d < HEAD_DIM
    acc = tl.zeros([D], tl.float32)
    total = 0.0
    most = float("-inf")
    for start in range(0, splits, TOGETHER):
        number = start + tl.arange(0, TOGETHER)
        there = number < splits
        place = (part + number) * heads + head
        part_total = tl.load(part_totals + place, mask=there, other=float("-inf"))
        mean = tl.load(
            parts + place[:, None] * HEAD_DIM + d[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        new_most = tl.maximum(most, tl.max(part_total, 0))
        weight = tl.exp2(part_total - new_most)
        fade = tl.exp2(most - new_most)
        total = total * fade + tl.sum(weight, 0)
        acc = acc * fade + tl.sum(mean * weight[:, None], 0)
        most = new_most
    tl.store(
        out + token * out_token + head * out_head + d, (acc / total).to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def attend_tiles(
    query,
    out,
    layer,
    scales,
    tiles,
    count,
    tables,
    query_token,
    query_head,
    out_token,
    out_head,
    block_stride,
    kind_stride,
    head_stride,
    scale_stride,
    kv_heads,
    window,
    scale,
    softcap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Programs (tiles or more, kv_heads): a run of at most M // GROUP tokens of one row."""
    if tl.program_id(0) >= tl.load(count):
        return
    tile = tiles + tl.program_id(0) * TILE_WORDS
    head = tl.program_id(1)
    first_token = tl.load(tile)
    tokens = tl.load(tile + 1)
    position = tl.load(tile + 2)
    table = tables + tl.load(tile + 3)
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    used = m // GROUP < tokens
    query_heads = head * GROUP + m % GROUP
    token = (first_token + m // GROUP).to(tl.int64)
    keys = layer + head * head_stride
    values = keys + kind_stride
    key_scales = scales
    value_scales = scales
    if SCALED:
        key_scales = scales + head * BLOCK
        value_scales = key_scales + kv_heads * BLOCK

    # Rows of the tile that are nobody's see what the last token sees, and are not stored.
    past = position + tl.minimum(m // GROUP, tokens - 1) + 1
    stop = position + tokens
    # All queries see all keys of [full, full_stop).
    full_stop = (position + 1) // N * N
    if WINDOWED:
        first = tl.maximum(past - window, 0)
        low = tl.maximum(position + 1 - window, 0)
        full = tl.cdiv(tl.maximum(stop - window, 0), N) * N
    else:
        first = tl.zeros([M], tl.int32)
        low = 0
        full = 0
    q = tl.load(
        query + token[:, None] * query_token + query_heads[:, None] * query_head + d[None, :],
        mask=used[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    acc = tl.zeros([M, D], tl.float32)
    total = tl.zeros([M], tl.float32)
    most = tl.full([M], float("-inf"), tl.float32)
    # fmt: off
    if WINDOWED:
        acc, total, most = _attend(
            acc, total, most, q, first, past, low, low // N * N, tl.minimum(full, stop), table, keys, values,
            block_stride, key_scales, value_scales, scale_stride, scale, softcap,
            HEAD_DIM, D, N, True, SOFTCAP, SCALED,
        )
    acc, total, most = _attend(
        acc, total, most, q, first, past, low, full, full_stop, table, keys, values,
        block_stride, key_scales, value_scales, scale_stride, scale, softcap,
        HEAD_DIM, D, N, False, SOFTCAP, SCALED,
    )
    acc, total, most = _attend(
        acc, total, most, q, first, past, low, tl.maximum(full, full_stop), stop, table, keys, values,
        block_stride, key_scales, value_scales, scale_stride, scale, softcap,
        HEAD_DIM, D, N, True, SOFTCAP, SCALED,
    )
    # fmt: on
    acc = acc / total[:, None]
    tl.store(
        out + token[:, None] * out_token + query_heads[:, None] * out_head + d[None, :],
        acc.to(out.dtype.element_ty),
        mask=used[:, None] & (d < HEAD_DIM)[None, :],
    )
