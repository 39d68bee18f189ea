"""The inner part of attention on CPU: one item, which is tiles of queries against the blocks of their rows.

A tile is a run of a row's query tokens with all query heads of one or several kv heads. Its rows go over
the keys in splits of 256, each at a fixed place: scores, softmax with a running maximum (Dao et al., 2022),
weighted values. What a query sums and in which order depends on its position alone, so its bits are the
same as a decode token, inside a prefill chunk, and on any thread.

Tiles of several rows whose tables begin with the same blocks make one item: those blocks are read once and
multiplied with the queries of all (Juravsky et al., 2024, Hydragen). Nothing is merged afterwards. Each row
keeps its own maximum, total and sums; only which rows a block meets while it is in the cache differs, and a
split that is shared in part is softened when each row's own blocks have been scored too. So sharing changes
no bit.

Where a CPU multiplies pairs of bfloat16, queries stay as they came (scores are scaled instead), weights are
rounded to bfloat16 and summed as such, and keys and values are put into pairs, once for all register tiles.

Scratch memory of a thread, by addresses from the parameter block: queries and sums [rows, head_dim], scores
[rows, 256 (+ 16 against cache aliasing)], running maxima [rows], totals [rows, 16], all float32 but for what
was just said, and the pairs of four blocks. May import numba, and is therefore imported when a kernel is
first wanted. The words of parameter block, items and tiles are named in attention_cpu_words.py;
attention_cpu.py says how work is cut into items.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from pagemill.kernels import attention_cpu_vectors as vectors
from pagemill.kernels.attention_cpu_words import (
    BLOCK_BYTES,
    GROUP,
    HALF,
    HEAD_BYTES,
    HEAD_DIM,
    ITEM,
    ITEM_BEGIN,
    ITEM_COMMON,
    ITEM_HEAD,
    ITEM_HEADS,
    ITEM_LIST,
    ITEM_ROWS,
    ITEM_TILE,
    ITEM_TILES,
    ITEM_WORDS,
    ITEMS,
    LAYER,
    LINE,
    MAXIMA,
    OUT,
    OUT_HEAD,
    OUT_TOKEN,
    PACKED,
    QUERY,
    QUERY_HEAD,
    QUERY_TOKEN,
    SCALE,
    SCORE_BYTES,
    SCORES,
    SCRATCH,
    SCRATCH_BYTES,
    SOFTCAP,
    SPLIT_BLOCKS,
    SUMS,
    TABLES,
    THREAD,
    TILE_LENGTH,
    TILE_LIST,
    TILE_PLACE,
    TILE_POSITION,
    TILE_ROW,
    TILE_ROWS,
    TILE_TOKEN,
    TILE_TOKENS,
    TILE_WORDS,
    TOTALS,
    VALUES,
    WIDE,
    WINDOW,
)
from pagemill.kernels.cpu_compile import c_function, inner
from pagemill.kernels.cpu_kinds import PAIRS
from pagemill.kernels.cpu_vector import LANES, get, holds_many_sums, put, real, take, word, word32

cap, exp2, exponentiate, fill = vectors.cap, vectors.exp2, vectors.exponentiate, vectors.fill
pack_keys, pack_values = vectors.pack_keys, vectors.pack_values
mask, scale, score, total, weigh = vectors.mask, vectors.scale, vectors.score, vectors.total, vectors.weigh


@inner
def _tile(params: int, item: int, number: int) -> Any:
    """Where tile `number` of an item is described."""
    return word(params, TILE_LIST) + (word(item, ITEM_TILE) + number) * (TILE_WORDS * 8)


@inner
def _table(params: int, tile: int) -> Any:
    return word(params, TABLES) + word(tile, TILE_PLACE) * 4


@inner
def _keys(params: int, item: int, tile: int, block: int) -> Any:
    """Where the keys of an item's first kv head begin in a block of a tile's row."""
    keys = word(params, LAYER) + word(item, ITEM_HEAD) * word(params, HEAD_BYTES)
    return keys + word32(_table(params, tile), block) * word(params, BLOCK_BYTES)


@inner
def _first(params: int, tile: int) -> Any:
    """The first block of which a tile sees something."""
    return max(0, word(tile, TILE_POSITION) - word(params, WINDOW) + 1) // 16


@inner
def _past(tile: int) -> Any:
    """The block behind the last one of which a tile sees something."""
    return (word(tile, TILE_POSITION) + word(tile, TILE_TOKENS) - 1) // 16 + 1


@inner
def _begin(params: int, mine: int, item: int, tile: int, pairs: int) -> None:
    """Loads and scales a tile's queries, and clears what is summed. pairs: queries stay as they are."""
    tokens, group, dims = word(tile, TILE_TOKENS), word(params, GROUP), word(params, HEAD_DIM)
    factor = real(word(params, SCALE))
    rows = tokens * group
    for head in range(word(item, ITEM_HEADS)):
        row = word(tile, TILE_ROW) + head * word(item, ITEM_ROWS)
        source = word(params, QUERY) + word(tile, TILE_TOKEN) * word(params, QUERY_TOKEN)
        source += (word(item, ITEM_HEAD) + head) * group * word(params, QUERY_HEAD)
        target = mine + row * dims * 4
        for t in range(tokens):
            for g in range(group):
                at = source + t * word(params, QUERY_TOKEN) + g * word(params, QUERY_HEAD)
                if pairs != 0:
                    scale(1, 1, at, target, dims // LANES, np.float32(1))
                elif word(params, HALF) != 0:
                    scale(1, 0, at, target, dims // LANES, factor)
                else:
                    scale(0, 0, at, target, dims // LANES, factor)
                target += dims * 4
        fill(mine + word(params, SUMS) + row * dims * 4, rows * dims // LANES, np.float32(0))
        fill(mine + word(params, TOTALS) + row * LINE, rows, np.float32(0))
        for r in range(row, row + rows):
            put(mine + word(params, MAXIMA) + r * 4, np.float32(-np.inf))


@cache
def _soften(kind: int) -> Any:
    def soften_row(params: int, mine: int, row: int, first: int, last: int, blocks: int) -> None:
        """Turns one row's scores of a split into weights; keys outside [first, last) get none."""
        scores = mine + word(params, SCORES) + row * SCORE_BYTES
        if first >= last:
            fill(scores, blocks, np.float32(0))
            return
        softcap = real(word(params, SOFTCAP))
        if softcap != 0:
            cap(scores, blocks, softcap)
        mask(scores, first, last, blocks)
        top = mine + word(params, MAXIMA) + row * 4
        old = get(top)
        new = exponentiate(kind, scores, blocks, old, mine + word(params, TOTALS) + row * LINE)
        put(top, new)
        if new != old:
            dims = word(params, HEAD_DIM)
            sums = mine + word(params, SUMS) + row * dims * 4
            scale(0, 0, sums, sums, dims // LANES, exp2(old - new))

    one = inner(soften_row, kind)

    def soften(params: int, mine: int, item: int, tile: int, begin: int, end: int) -> None:
        """All rows of a tile over the split of blocks [begin, end)."""
        group, position = word(params, GROUP), word(tile, TILE_POSITION)
        for head in range(word(item, ITEM_HEADS)):
            row = word(tile, TILE_ROW) + head * word(item, ITEM_ROWS)
            for r in range(word(tile, TILE_TOKENS) * group):
                key = position + r // group
                first = max(begin * 16, key - word(params, WINDOW) + 1) - begin * 16
                last = min(end * 16, key + 1) - begin * 16
                one(params, mine, row + r, first, last, end - begin)

    return inner(soften, kind)


@inner
def _finish(params: int, mine: int, item: int, tile: int) -> None:
    """Divides by the totals and stores a tile's outputs."""
    tokens, group, dims = word(tile, TILE_TOKENS), word(params, GROUP), word(params, HEAD_DIM)
    for head in range(word(item, ITEM_HEADS)):
        r = word(tile, TILE_ROW) + head * word(item, ITEM_ROWS)
        target = word(params, OUT) + word(tile, TILE_TOKEN) * word(params, OUT_TOKEN)
        target += (word(item, ITEM_HEAD) + head) * group * word(params, OUT_HEAD)
        for t in range(tokens):
            for g in range(group):
                sums = mine + word(params, SUMS) + r * dims * 4
                factor = np.float32(1) / total(mine + word(params, TOTALS) + r * LINE)
                at = target + t * word(params, OUT_TOKEN) + g * word(params, OUT_HEAD)
                if word(params, HALF) != 0:
                    scale(0, 1, sums, at, dims // LANES, factor)
                else:
                    scale(0, 0, sums, at, dims // LANES, factor)
                r += 1


@inner
def _first_row(params: int, tile: int, block: int, all_rows: int, m: int) -> Any:
    """The first of a head's rows in a tile that may see something of a block, at a register tile's start."""
    if all_rows != 0:
        return 0
    return max(0, block * 16 - word(tile, TILE_POSITION)) * word(params, GROUP) // m * m


@inner
def _past_row(params: int, tile: int, block: int, all_rows: int) -> Any:
    if all_rows != 0:
        return all_rows
    tokens = block * 16 + 15 + word(params, WINDOW) - word(tile, TILE_POSITION)
    return min(word(tile, TILE_TOKENS), tokens) * word(params, GROUP)


# Two passes over blocks of a split, which begins at the block `origin`: scores before the softmax, values
# after it. Both go block by block and within one head by head, as memory lies, and name what comes next so
# that it is fetched meanwhile: with blocks all over memory the processor cannot guess it. Of each head only
# those rows are computed that see something of the block, rounded to whole register tiles; or `all_rows` of
# them, those of all tiles of an item, over blocks that they share. A row that does not see such a block
# has no weight on it, and adding zero times a value changes nothing. Numbers that are multiplied in pairs are
# put together once for all register tiles of a head, where there are several.


@inner
def _one(params: int, item: int, tile: int, block: int, shift: int) -> Any:
    """The address `shift` bytes into a block's keys, as a tuple."""
    return (_keys(params, item, tile, block) + shift,)


@inner
def _four(params: int, item: int, tile: int, block: int, shift: int) -> Any:
    """Those of WIDE blocks."""
    return (
        _keys(params, item, tile, block) + shift,
        _keys(params, item, tile, block + 1) + shift,
        _keys(params, item, tile, block + 2) + shift,
        _keys(params, item, tile, block + 3) + shift,
    )


@inner
def _one_at(address: int, step: int) -> Any:
    return (address,)


@inner
def _four_at(address: int, step: int) -> Any:
    return (address, address + step, address + 2 * step, address + 3 * step)


@cache
def _score_blocks(m: int, kind: int, wide: int) -> Any:
    """A function that scores the heads of a tile, or of all tiles, over `wide` blocks: 1 or WIDE."""
    places, spread = (_one, _one_at) if wide == 1 else (_four, _four_at)

    def score_blocks(
        params: int, mine: int, item: int, tile: int, block: int, first: int, past: int, end: int,
        follow: int, scores: int,
    ) -> None:  # fmt: skip
        dims, heads = word(params, HEAD_DIM), word(item, ITEM_HEADS)
        row_bytes, factor = dims * 4, real(word(params, SCALE))
        packed = spread(mine + word(params, PACKED), dims * LINE // 2)
        for head in range(heads):
            shift = head * word(params, HEAD_BYTES)
            keys = places(params, item, tile, block, shift)
            if head + 1 < heads:
                ahead = places(params, item, tile, block, shift + word(params, HEAD_BYTES))
            elif block + 2 * wide <= end:
                ahead = places(params, item, tile, block + wide, 0)
            elif block + wide < end:
                ahead = spread(_keys(params, item, tile, block + wide), 0)
            else:
                ahead = spread(follow, 0)
            row = word(tile, TILE_ROW) + head * word(item, ITEM_ROWS)
            if kind == PAIRS and past - first > m:
                for i in range(wide):
                    pack_keys(dims, keys[i], ahead[i], packed[i])
                for r in range(row + first, row + past, m):
                    query, to = mine + r * row_bytes, scores + r * SCORE_BYTES
                    score(m, kind, 1, wide, dims, query, row_bytes, packed, packed, factor, to)
            else:
                for r in range(row + first, row + past, m):
                    query, to = mine + r * row_bytes, scores + r * SCORE_BYTES
                    score(m, kind, 0, wide, dims, query, row_bytes, keys, ahead, factor, to)

    return inner(score_blocks, m, kind, wide)


@cache
def _score_pass(m: int, kind: int) -> Any:
    one, four = _score_blocks(m, kind, 1), _score_blocks(m, kind, WIDE)
    wide = holds_many_sums()

    def score_pass(
        params: int,
        mine: int,
        item: int,
        tile: int,
        all_rows: int,
        origin: int,
        begin: int,
        end: int,
        follow: int,
    ) -> None:
        block = begin
        while block < end:
            scores = mine + word(params, SCORES) + (block - origin) * LINE
            first = _first_row(params, tile, block, all_rows, m)
            if wide and block + WIDE <= end:
                past = _past_row(params, tile, block + WIDE - 1, all_rows)
                four(params, mine, item, tile, block, first, past, end, follow, scores)
                block += WIDE
            else:
                past = _past_row(params, tile, block, all_rows)
                one(params, mine, item, tile, block, first, past, end, follow, scores)
                block += 1

    return inner(score_pass, m, kind)


@cache
def _weigh_rows(m: int, kind: int, packed: int) -> Any:
    """A function that adds the weighted values of some keys to a head's rows [first, past)."""
    # Few rows take several vectors of values at once, to keep as many sums going as many rows do.
    width = 4 if holds_many_sums() else 2 if m <= TILE_ROWS // 2 else 1

    def weigh_rows(
        params: int, mine: int, first: int, past: int, count: int, weights: int, values: int, ahead: int
    ) -> None:
        dims = word(params, HEAD_DIM)
        whole = dims // LANES
        evenly = whole // width * width
        for r in range(first, past, m):
            of_row, sums = weights + r * SCORE_BYTES, mine + word(params, SUMS) + r * dims * 4
            weigh(m, kind, packed, width, 0, evenly, dims, count, of_row, values, ahead, sums)
            if width != 1:
                weigh(m, kind, packed, 1, evenly, whole, dims, count, of_row, values, ahead, sums)

    return inner(weigh_rows, m, kind, packed)


@cache
def _weigh_pass(m: int, kind: int) -> Any:
    of_values, of_packed = _weigh_rows(m, kind, 0), _weigh_rows(m, kind, int(kind == PAIRS))
    # Blocks whose values are put in pairs together, and how wide a block's weights are.
    most, block_weights = (WIDE, LINE // 2) if kind == PAIRS else (1, LINE)

    def weigh_pass(
        params: int,
        mine: int,
        item: int,
        tile: int,
        all_rows: int,
        origin: int,
        begin: int,
        end: int,
        follow: int,
    ) -> None:
        dims, heads, values = word(params, HEAD_DIM), word(item, ITEM_HEADS), word(params, VALUES)
        packed = mine + word(params, PACKED)
        block = begin
        while block < end:
            first = _first_row(params, tile, block, all_rows, m)
            blocks = min(most, end - block)
            past = _past_row(params, tile, block + blocks - 1, all_rows)
            several = kind == PAIRS and past - first > m
            if not several:
                blocks = 1
                past = _past_row(params, tile, block, all_rows)
            count = min(16 * blocks, word(tile, TILE_LENGTH) - block * 16)
            for head in range(heads):
                shift = head * word(params, HEAD_BYTES) + values
                row = word(tile, TILE_ROW) + head * word(item, ITEM_ROWS)
                at = _keys(params, item, tile, block) + shift
                if several:
                    for i in range(blocks):
                        at = _keys(params, item, tile, block + i) + shift
                        ahead = at
                        if i + 1 < blocks:
                            ahead = _keys(params, item, tile, block + i + 1) + shift
                        part = packed + i * dims * LINE // 2
                        pack_values(dims, min(16, count - 16 * i), at, ahead, part)
                if head + 1 < heads:
                    ahead = at + word(params, HEAD_BYTES)
                elif block + 1 < end:
                    ahead = _keys(params, item, tile, block + 1) + values
                else:
                    ahead = follow
                weights = mine + word(params, SCORES) + (block - origin) * block_weights
                if several:
                    of_packed(params, mine, row + first, row + past, count, weights, packed, ahead)
                else:
                    of_values(params, mine, row + first, row + past, count, weights, at, ahead)
            block += blocks

    return inner(weigh_pass, m, kind)


@inner
def _split_end(block: int) -> Any:
    """The block behind the split that a block is in."""
    return (block // SPLIT_BLOCKS + 1) * SPLIT_BLOCKS


@inner
def _own_keys(params: int, item: int, number: int, block: int) -> Any:
    """Keys to fetch ahead: of a block of a tile's row, or of its last one; of the last tile if there are
    fewer."""
    tile = _tile(params, item, min(number, word(item, ITEM_TILES) - 1))
    return _keys(params, item, tile, min(block, _past(tile) - 1))


def _together(m: int, kind: int) -> Any:
    """A function that computes the splits which begin within the common blocks of an item's tiles.

    Of the last of these splits each tile has blocks of its own as well; its one token takes tiles of m rows.
    """
    score_all, weigh_all = _score_pass(TILE_ROWS, kind), _weigh_pass(TILE_ROWS, kind)
    score_own, weigh_own = _score_pass(m, kind), _weigh_pass(m, kind)
    soften = _soften(kind)

    def together(params: int, mine: int, item: int) -> None:
        lead, tiles, rows = _tile(params, item, 0), word(item, ITEM_TILES), word(item, ITEM_ROWS)
        begin, common, values = word(item, ITEM_BEGIN), word(item, ITEM_COMMON), word(params, VALUES)
        while begin < common:
            end = _split_end(begin)
            shared = min(end, common)
            follow = _keys(params, item, lead, begin) + values
            if shared < end:
                follow = _own_keys(params, item, 0, shared)
            score_all(params, mine, item, lead, rows, begin, begin, shared, follow)
            for i in range(tiles):
                tile = _tile(params, item, i)
                past = min(end, _past(tile))
                follow = _own_keys(params, item, i + 1, shared)
                score_own(params, mine, item, tile, 0, begin, shared, past, follow)
                soften(params, mine, item, tile, begin, past)
            follow = _own_keys(params, item, 0, shared)
            if shared < end:
                follow += values
            weigh_all(params, mine, item, lead, rows, begin, begin, shared, follow)
            for i in range(tiles):
                tile = _tile(params, item, i)
                follow = _own_keys(params, item, i + 1, shared) + values
                weigh_own(params, mine, item, tile, 0, begin, shared, min(end, _past(tile)), follow)
            begin = end

    return inner(together, m, kind)


def _rest(m: int, kind: int) -> Any:
    """A function that computes one tile's splits from `begin` on with register tiles of m rows."""
    score_own, weigh_own, soften = _score_pass(m, kind), _weigh_pass(m, kind), _soften(kind)

    def rest(params: int, mine: int, item: int, tile: int, begin: int, follow: int) -> None:
        past = _past(tile)
        while begin < past:
            end = min(past, _split_end(begin))
            values = _keys(params, item, tile, begin) + word(params, VALUES)
            score_own(params, mine, item, tile, 0, begin, begin, end, values)
            soften(params, mine, item, tile, begin, end)
            after = follow
            if end < past:
                after = _keys(params, item, tile, end)
            weigh_own(params, mine, item, tile, 0, begin, begin, end, after)
            begin = end

    return inner(rest, m, kind)


def compile_attention(rows: int, kind: int) -> int:
    """Machine code for one token's `rows` rows a register tile; the address of void(int64 *words).

    kind: FLOAT32, WIDENED or PAIRS, which is for queries in bfloat16 too.
    """
    together, small = _together(rows, kind), _rest(rows, kind)
    large = small if rows == TILE_ROWS else _rest(TILE_ROWS, kind)
    pairs = int(kind == PAIRS)

    def attend(params: int) -> None:
        mine = word(params, SCRATCH) + take(params + THREAD * 8) * word(params, SCRATCH_BYTES)
        last = word(params, ITEMS) - 1
        number = take(params + ITEM * 8)
        while number <= last:
            # The next item is taken before this one is done, so that its first block can be on its way.
            following = take(params + ITEM * 8)
            item = word(params, ITEM_LIST) + number * (ITEM_WORDS * 8)
            after = word(params, ITEM_LIST) + min(following, last) * (ITEM_WORDS * 8)
            tiles = word(item, ITEM_TILES)
            for i in range(tiles):
                _begin(params, mine, item, _tile(params, item, i), pairs)
            done = 0
            if word(item, ITEM_COMMON) != 0:
                together(params, mine, item)
                done = _split_end(word(item, ITEM_COMMON) - 1)
            for i in range(tiles):
                tile = _tile(params, item, i)
                begin = max(done, _first(params, tile))
                if i + 1 < tiles:
                    follow = _own_keys(params, item, i + 1, done)
                else:
                    follow = _keys(params, after, _tile(params, after, 0), word(after, ITEM_BEGIN))
                if word(tile, TILE_TOKENS) == 1:
                    small(params, mine, item, tile, begin, follow)
                else:
                    large(params, mine, item, tile, begin, follow)
                _finish(params, mine, item, tile)
            number = following

    return c_function(attend, rows, kind)
