"""Choosing tokens in Triton without sorting a vocabulary.

Three passes. `survey` finds the largest logit of each block of a row; `weigh` the mass of a row, and the
token of each row that no filter binds; `pick` does the others, a program a row: it gathers the few tokens
that filters could keep, bounded from below by what the first passes know, and finds the border among them
by halving.

Scaled logits (logit - largest) / temperature are never above 0, so as bits without the sign they are
integers that grow as the value falls: "magnitudes" here. Halving over those ends after 31 steps at the very
border, and tokens that tie there stay in together.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

# The magnitude of minus infinity: no number's is greater.
LAST: tl.constexpr = tl.constexpr(0x7F800000)
NO_TOKEN: tl.constexpr = tl.constexpr(0x7FFFFFFF)
# As in sample.py.
COLDEST: tl.constexpr = tl.constexpr(1e-8)


@triton.jit
def noise_bits(first, second, index):
    """sample.noise_bits in unsigned arithmetic: two key words and vocabulary indices."""
    x = index.to(tl.uint32) * 0x9E3779B1 + first
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= second
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def gumbel(first, second, index):
    """sample.gumbel: -log(-log(1 - u)), small u giving large noise."""
    u = ((noise_bits(first, second, index) & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10
    u = tl.minimum(u, 1.0 - 5.960464477539063e-08)
    # log(1 - u) where 1 - u has lost digits of u: what was lost multiplies back (Goldberg, 1991).
    rest = 1.0 - u
    lost = tl.where(rest == 1.0, 1.0, tl.div_rn(u, tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    inner = tl.where(rest == 1.0, u, -tl.log(rest) * lost)
    return -tl.log(inner)


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _first_of_best(score, index):
    """The largest score, and the lowest index among its equals."""
    best = tl.max(score, axis=0)
    return best, tl.min(tl.where(score == best, index, NO_TOKEN), axis=0)


@triton.jit
def survey_kernel(logits, maxima, stride, vocabulary, blocks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, part): maxima [rows, blocks], the largest logit of each BLOCK in a part of CHUNK."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + at, mask=at < vocabulary, other=float("-inf"))
    found = tl.max(tl.reshape(x, (CHUNK // BLOCK, BLOCK)), axis=1)
    block = part * (CHUNK // BLOCK) + tl.arange(0, CHUNK // BLOCK)
    tl.store(maxima + row * blocks + block, found)


@triton.jit
def _largest(maxima, row, blocks, BLOCKS: tl.constexpr):
    at = tl.arange(0, BLOCKS)
    return tl.load(maxima + row * blocks + at, mask=at < blocks, other=float("-inf"))


@triton.jit
def weigh_kernel(
    logits,
    maxima,
    temperature,
    top_k,
    top_p,
    min_p,
    keys,
    masses,
    scores,
    indices,
    stride,
    vocabulary,
    blocks,
    parts,
    CHOOSE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (row, part): sum of exp of scaled logits in float64, or the best token where none is filtered.

    masses, scores, indices: [rows, parts]. Without CHOOSE temperature is 1, and only masses are wanted.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest = tl.max(_largest(maxima, row, blocks, BLOCKS), axis=0)
    at = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + at, mask=at < vocabulary, other=float("-inf")) - largest
    place = row * parts + part
    if CHOOSE:
        heat = tl.load(temperature + row)
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        if heat > 0:
            x = tl.div_rn(x, tl.zeros_like(x) + tl.maximum(heat, COLDEST))
        if (heat > 0) & ((k > 0) | (p < 1) | (tl.load(min_p + row) > 0)):
            if (k == 0) & (p < 1):
                tl.store(masses + place, tl.sum(tl.exp(x).to(tl.float64), axis=0))
        else:
            if heat > 0:
                first = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
                second = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
                x += gumbel(first, second, at)
            best, index = _first_of_best(x, at)
            tl.store(scores + place, best)
            tl.store(indices + place, index)
    else:
        tl.store(masses + place, tl.sum(tl.exp(x).to(tl.float64), axis=0))


@triton.jit
def _scaled(source, start, size, largest, heat, TILE: tl.constexpr):
    at = start + tl.arange(0, TILE)
    x = tl.load(source + at, mask=at < size, other=float("-inf"))
    return tl.div_rn(x - largest, tl.zeros_like(x) + heat)


@triton.jit
def _count(source, size, largest, heat, most, TILE: tl.constexpr):
    """How many of a row have a magnitude of `most` or less."""
    count = tl.zeros((TILE,), tl.int32)
    for start in range(0, size, TILE):
        x = _scaled(source, start, size, largest, heat, TILE)
        count += (_magnitude(x) <= most).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def _mass(source, size, largest, heat, most, TILE: tl.constexpr):
    """The sum of exp over those of magnitude `most` or less, in float64."""
    mass = tl.zeros((TILE,), tl.float64)
    for start in range(0, size, TILE):
        x = _scaled(source, start, size, largest, heat, TILE)
        mass += tl.where(_magnitude(x) <= most, tl.exp(x), 0.0).to(tl.float64)
    return tl.sum(mass, axis=0)


@triton.jit
def _kth_in_registers(magnitudes, k):
    """The k-th smallest of magnitudes, LAST if there are fewer."""
    low, high = tl.full((), -1, tl.int32), tl.full((), LAST, tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((magnitudes <= middle).to(tl.int32), axis=0) >= k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


@triton.jit
def _kth(source, size, largest, heat, k, most, TILE: tl.constexpr):
    """The k-th smallest magnitude of a row, given that it is `most` at the most."""
    low, high = tl.full((), -1, tl.int32), most
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = _count(source, size, largest, heat, middle, TILE) >= k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


@triton.jit
def _last_within(source, size, largest, heat, wanted, most, TILE: tl.constexpr):
    """The greatest magnitude up to `most` before which less than the mass `wanted` lies; 0 always is one."""
    low, high = tl.full((), 0, tl.int32), most + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        within = _mass(source, size, largest, heat, middle - 1, TILE) < wanted
        low = tl.where(within, middle, low)
        high = tl.where(within, high, middle)
    return low


@triton.jit
def _gather(source, vocabulary, largest, heat, most, values, indices, ROOM: tl.constexpr, TILE: tl.constexpr):
    """Puts scaled logits of magnitude `most` or less and their indices into `values` and `indices`, in order.

    Returns how many there are; those behind ROOM are not put.
    """
    count = tl.full((), 0, tl.int32)
    for start in range(0, vocabulary, TILE):
        x = _scaled(source, start, vocabulary, largest, heat, TILE)
        at = start + tl.arange(0, TILE)
        wanted = (_magnitude(x) <= most) & (at < vocabulary)
        place = count + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        tl.store(values + place, x, mask=wanted & (place < ROOM))
        tl.store(indices + place, at, mask=wanted & (place < ROOM))
        count += tl.sum(wanted.to(tl.int32), axis=0)
    # What one thread has put another reads.
    tl.debug_barrier()
    return count


@triton.jit
def _bound(magnitudes, k, p, least, total, vocabulary):
    """A magnitude that no token has which the filters keep or must weigh, or none below."""
    bound = tl.full((), LAST, tl.int32)
    if k > 0:
        # So many blocks have their largest there or above: at least so many tokens.
        bound = _kth_in_registers(magnitudes, k)
    else:
        floor = tl.full((), float("-inf"), tl.float32)
        if p < 1:
            # What is no better than a kept token outweighs (1 - p) of all, and is no more than all tokens. A
            # tenth is more than rounding takes.
            share = total * (1.0 - p.to(tl.float64)) / vocabulary
            floor = tl.log(share.to(tl.float32)) - 0.1
        else:
            floor = least.to(tl.float32) - 0.1
        bound = _magnitude(tl.minimum(floor, 0.0))
    return tl.minimum(bound, LAST)


@triton.jit
def pick_kernel(
    logits,
    maxima,
    temperature,
    top_k,
    top_p,
    min_p,
    keys,
    masses,
    scores,
    indices,
    values,
    places,
    tokens,
    stride,
    vocabulary,
    blocks,
    parts,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program row: tokens [rows] int64. values, places [rows, ROOM]: room for candidates."""
    row = tl.program_id(0).to(tl.int64)
    heat, k = tl.load(temperature + row), tl.load(top_k + row)
    p, minimum = tl.load(top_p + row), tl.load(min_p + row)
    part = tl.arange(0, PARTS)
    inside = part < parts
    if (heat > 0) & ((k > 0) | (p < 1) | (minimum > 0)):
        heat = tl.maximum(heat, COLDEST)
        best_of = _largest(maxima, row, blocks, BLOCKS)
        largest = tl.max(best_of, axis=0)
        count = tl.minimum(k, vocabulary).to(tl.int32)
        least = tl.log(minimum.to(tl.float64))
        total = tl.full((), 1.0, tl.float64)
        if (count == 0) & (p < 1):
            total = tl.sum(tl.load(masses + row * parts + part, mask=inside, other=0.0), axis=0)
        magnitudes = _magnitude(tl.div_rn(best_of - largest, tl.zeros_like(best_of) + heat))
        bound = _bound(magnitudes, count, p, least, total, vocabulary)
        source, room, names = logits + row * stride, values + row * ROOM, places + row * ROOM
        size = _gather(source, vocabulary, largest, heat, bound, room, names, ROOM, TILE)
        gathered = size <= ROOM
        if gathered:
            source = room
            # Gathered ones are scaled already; these two change nothing.
            largest, heat = largest * 0.0, heat * 0.0 + 1.0
        else:
            size = tl.full((), 0, tl.int32) + vocabulary
        token = _pick_kept(
            source, size, largest, heat, count, p, least, total, bound, row, keys, names, gathered, TILE
        )
        tl.store(tokens + row, tl.minimum(token, vocabulary - 1).to(tl.int64))
    else:
        score = tl.load(scores + row * parts + part, mask=inside, other=float("-inf"))
        index = tl.load(indices + row * parts + part, mask=inside, other=NO_TOKEN)
        score, chosen = _first_of_best(score, index)
        tl.store(tokens + row, tl.minimum(chosen, vocabulary - 1).to(tl.int64))


@triton.jit
def _pick_kept(
    source, size, largest, heat, k, p, least, total, bound, row, keys, names, gathered, TILE: tl.constexpr
):
    """The largest noisy one of those that all filters keep; of equals the lowest index."""
    border = bound
    if k > 0:
        border = _kth(source, size, largest, heat, k, bound, TILE)
    if p < 1:
        if k > 0:
            total = _mass(source, size, largest, heat, border, TILE)
        border = _last_within(source, size, largest, heat, p.to(tl.float64) * total, border, TILE)
    first = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    second = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    best, token = tl.full((), float("-inf"), tl.float32), tl.full((), NO_TOKEN, tl.int32)
    for start in range(0, size, TILE):
        x = _scaled(source, start, size, largest, heat, TILE)
        at = start + tl.arange(0, TILE)
        index = tl.where(gathered, tl.load(names + at, mask=gathered & (at < size), other=0), at)
        kept = (_magnitude(x) <= border) & ((x.to(tl.float64) >= least) | (x == 0.0)) & (at < size)
        noisy = tl.where(kept, x + gumbel(first, second, index), float("-inf"))
        score, chosen = _first_of_best(noisy, index)
        # Tiles come in order of their indices, so an equal of a later one is not better.
        token = tl.where(score > best, chosen, token)
        best = tl.maximum(best, score)
    return token


@triton.jit
def logprobs_kernel(
    logits,
    maxima,
    masses,
    tokens,
    values,
    places,
    own,
    best_values,
    best_tokens,
    stride,
    vocabulary,
    blocks,
    parts,
    top,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program row: own [rows], the chosen token's log-probability; best_values, best_tokens [rows, top]."""
    row = tl.program_id(0).to(tl.int64)
    best_of = _largest(maxima, row, blocks, BLOCKS)
    largest = tl.max(best_of, axis=0)
    part = tl.arange(0, PARTS)
    mass = tl.sum(tl.load(masses + row * parts + part, mask=part < parts, other=0.0), axis=0)
    log_mass = tl.log(mass).to(tl.float32)
    source = logits + row * stride
    tl.store(own + row, tl.load(source + tl.load(tokens + row)) - largest - log_mass)
    if top > 0:
        bound = _kth_in_registers(_magnitude(best_of - largest), top)
        room, names = values + row * ROOM, places + row * ROOM
        heat = largest * 0.0 + 1.0
        size = _gather(source, vocabulary, largest, heat, bound, room, names, ROOM, TILE)
        gathered = size <= ROOM
        if gathered:
            source = room
            largest = largest * 0.0
        else:
            size = tl.full((), 0, tl.int32) + vocabulary
        last, last_index = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
        for rank in range(top):
            best, token = tl.full((), float("-inf"), tl.float32), tl.full((), NO_TOKEN, tl.int32)
            for start in range(0, size, TILE):
                x = _scaled(source, start, size, largest, heat, TILE)
                at = start + tl.arange(0, TILE)
                index = tl.where(gathered, tl.load(names + at, mask=gathered & (at < size), other=0), at)
                behind = ((x < last) | ((x == last) & (index > last_index))) & (at < size)
                score, chosen = _first_of_best(
                    tl.where(behind, x, float("-inf")), tl.where(behind, index, NO_TOKEN)
                )
                better = (score > best) | ((score == best) & (chosen < token))
                token = tl.where(better, chosen, token)
                best = tl.maximum(best, score)
            last, last_index = best, token
            tl.store(best_values + row * top + rank, best - log_mass)
            tl.store(best_tokens + row * top + rank, tl.minimum(token, vocabulary - 1).to(tl.int64))
