"""Choosing tokens from logits: penalties, filters and seeded noise, a whole batch at once.

Noise is not drawn, it is computed: a hash of (seed, sample, position, vocabulary index) in 32-bit integer
arithmetic, the same bits on every device, turned into Gumbel noise; the largest noisy logit is then a
sample from the softmax. So a row's tokens depend on nothing but itself, and a row computed again repeats.

All logits here are float32 [rows, vocabulary].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill.kernels.choice import takes_triton

# Filters first look at the best WINDOW tokens of the BLOCKS best blocks of BLOCK tokens, which mostly hold
# all that they keep; then at the best WIDE_WINDOW of all; last they sort the vocabulary. 64 rows of 49,152,
# one thread of an EPYC 7003: 8, 30 and 290 ms.
BLOCK, BLOCKS, WINDOW, WIDE_WINDOW = 64, 64, 256, 1024
# Below this a temperature leaves nothing to chance: a difference of one unit in the last place of a
# float32 logit, divided by it, is more than the noise can span.
COLDEST = 1e-8

_MASK64 = (1 << 64) - 1
# Odd multipliers as signed 32-bit: the golden ratio, then the pair of the "lowbias32" finalizer
# (Ettinger, "Prospecting for hash functions", 2018).
_GOLDEN = 0x9E3779B1 - (1 << 32)
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B - (1 << 32)


def noise_keys(seeds: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Two 32-bit words [rows, 2] that stand for (seed, sample, position) of each row."""
    bases = (noise_base(seed, sample) for seed, sample in zip(seeds, samples, strict=True))
    keys = [mix64(base ^ position) for base, position in zip(bases, positions, strict=True)]
    words = np.array(keys, dtype=np.uint64).view(np.int32).reshape(-1, 2)
    return torch.from_numpy(words)


def noise_base(seed: int, sample: int) -> int:
    """64 bits that stand for (seed, sample) of a row at every position: a key is one more step from here."""
    return mix64(mix64(seed & _MASK64) ^ sample)


def mix64(x: int) -> int:
    """The finalizer of splitmix64 (Steele et al., 2014) after one step of its counter."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def noise_bits(keys: Tensor, indices: Tensor) -> Tensor:
    """The hash, int32 of indices' shape: keys [rows, 2] int32, indices [rows or 1, n] integers.

    The second key word enters between the multiplications: with both added at the front, the noise of one
    row would be that of another, shifted.
    """
    x = indices.to(torch.int32) * _GOLDEN + keys[:, :1]
    # int32 shifts copy the sign downwards; the mask makes them the unsigned shifts that the hash means.
    x ^= (x >> 16) & 0xFFFF
    x *= _MULTIPLY_1
    x ^= keys[:, 1:]
    x ^= (x >> 15) & 0x1FFFF
    x *= _MULTIPLY_2
    x ^= (x >> 16) & 0xFFFF
    return x


def gumbel(keys: Tensor, indices: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, one for each (row, vocabulary index)."""
    # u in (0, 1) is small where the noise is large, since float32 is finest near zero: -log(-log(1 - u)).
    u = (noise_bits(keys, indices) & 0x7FFFFFFF).float()
    u.add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def apply_penalties(
    logits: Tensor,
    prompt: Tensor,
    output: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """Penalises tokens in place; `prompt` and `output` count each token of the row, [rows, vocabulary].

    Repetition divides a positive logit and multiplies a negative one where the token occurred in prompt or
    output (Keskar et al., 2019); presence and frequency subtract where it occurred in the output, once
    and for each time (OpenAI's definition).
    """
    repetition = torch.where((prompt + output) > 0, repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / repetition, logits * repetition))
    logits.sub_((output > 0) * presence[:, None])
    logits.sub_(output * frequency[:, None])


def count_tokens(rows: Tensor, tokens: Tensor, num_rows: int, vocabulary: int) -> Tensor:
    """How often each token occurs in each row: (rows, tokens) pairs to [num_rows, vocabulary] float32."""
    counts = torch.zeros(num_rows * vocabulary, dtype=torch.float32, device=tokens.device)
    counts.index_add_(0, rows * vocabulary + tokens, torch.ones(tokens.shape[0], device=tokens.device))
    return counts.view(num_rows, vocabulary)


def best_tokens(logits: Tensor) -> Tensor:
    """The best token of each row, int64 [rows]; of equals the one with the lowest index."""
    if takes_triton(logits):
        from pagemill.kernels import sample_triton

        return sample_triton.best_tokens(logits)
    # torch's argmax takes nine times as long here (3.2 ms against 0.35 for 64 rows of 49,152).
    return torch.from_numpy(logits.numpy().argmax(-1))


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    """One token a row, int64 [rows]. Temperature scales, then top-k, top-p of what is left, min-p.

    temperature float32, 0 for the best token as in `best_tokens`; top_k int64, 0 for off; top_p float32, 1
    for off; min_p float32, 0 for off; all [rows]; keys of noise_keys. Tokens that tie at a filter's border
    stay in together, so that no result hangs on how a sort breaks ties.
    """
    if takes_triton(logits):
        from pagemill.kernels import sample_triton

        return sample_triton.sample_tokens(logits, temperature, top_k, top_p, min_p, keys)
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled.div_(temperature.clamp(min=COLDEST)[:, None])
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    free = torch.nonzero(~filtered).squeeze(1)
    if free.numel():
        tokens[free] = _pick_any(_rows(scaled, free), keys[free])
    bound = torch.nonzero(filtered).squeeze(1)
    if bound.numel():
        filters = (top_k[bound], top_p[bound].double(), min_p[bound].double())
        tokens[bound] = _pick_filtered(_rows(scaled, bound), *filters, keys[bound])
    cold = torch.nonzero(temperature == 0).squeeze(1)
    if cold.numel():
        tokens[cold] = best_tokens(_rows(logits, cold))
    return tokens


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x if rows.numel() == x.shape[0] else x[rows]


def _pick_any(scaled: Tensor, keys: Tensor) -> Tensor:
    """The largest noisy logit over the whole vocabulary, a few rows at a time so that they stay in cache."""
    vocabulary = torch.arange(scaled.shape[1], dtype=torch.int32)[None]
    picks = [
        best_tokens(gumbel(keys[i : i + 4], vocabulary).add_(scaled[i : i + 4]))
        for i in range(0, scaled.shape[0], 4)
    ]
    return torch.cat(picks)


def _pick_filtered(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor) -> Tensor:
    """Looks at ever more candidates until each row's filters keep none that might lie beyond them."""
    tokens = torch.empty(scaled.shape[0], dtype=torch.int64)
    # Only top-p over the whole vocabulary needs the mass of all of it.
    whole = bool(((top_k == 0) & (top_p < 1)).any())
    totals = _sums(scaled.exp()) if whole else torch.ones_like(top_p)
    open_rows = torch.arange(scaled.shape[0])
    for candidates in (_of_best_blocks, _of_wide_window, _of_all):
        found = candidates(_rows(scaled, open_rows))
        if found is None:
            continue
        values, indices, beyond = found
        k, filters = top_k[open_rows], (top_p[open_rows], min_p[open_rows])
        least = _least_kept(values, totals[open_rows], k, *filters)
        sure = (least > beyond) & (k <= values.shape[1])
        tokens[open_rows] = _pick_of(values, indices, least, keys[open_rows])
        open_rows = open_rows[~sure]
        if not open_rows.numel():
            break
    return tokens


def _sums(x: Tensor) -> Tensor:
    """The sum of each row in float64.

    Not by torch, which adds up a single long row in as many parts as there are threads.
    """
    return torch.from_numpy(x.double().numpy().sum(-1))


# Candidates: values [rows, n], best first, their indices, and a bound that no other token lies above [rows].
Candidates = tuple[Tensor, Tensor, Tensor]


def _of_best_blocks(scaled: Tensor) -> Candidates | None:
    rows, vocabulary = scaled.shape
    if vocabulary < 2 * BLOCK * BLOCKS:
        return None
    blocks = F.pad(scaled, (0, -vocabulary % BLOCK), value=-torch.inf).view(rows, -1, BLOCK)
    highest, which = blocks.view(-1, BLOCK).amax(-1).view(rows, -1).topk(BLOCKS + 1, dim=-1)
    which = which[:, :BLOCKS]
    inside = blocks.gather(1, which[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
    values, places = inside.topk(WINDOW, dim=-1)
    indices = which.gather(1, places // BLOCK) * BLOCK + places % BLOCK
    return values, indices, torch.maximum(highest[:, BLOCKS], values[:, -1])


def _of_wide_window(scaled: Tensor) -> Candidates | None:
    if scaled.shape[1] < 2 * WIDE_WINDOW:
        return None
    values, indices = scaled.topk(WIDE_WINDOW, dim=-1)
    return values, indices, values[:, -1]


def _of_all(scaled: Tensor) -> Candidates:
    values, indices = scaled.sort(dim=-1, descending=True, stable=True)
    return values, indices, torch.full((scaled.shape[0],), -torch.inf)


def _least_kept(values: Tensor, totals: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest scaled logit that all filters keep [rows]; values are sorted, best first.

    totals: sum of exp over the row's whole vocabulary, float64.
    """
    width = values.shape[1]
    kth = values.gather(1, (torch.where(top_k > 0, top_k, width).clamp(max=width) - 1)[:, None])
    kth = torch.where((top_k > 0)[:, None], kth, -torch.inf)
    masses = torch.where(values >= kth, values, -torch.inf).double().exp()
    totals = torch.where(top_k > 0, _sums(masses), totals)
    before = masses.cumsum(-1) - masses
    # A token stays while the better ones alone do not reach top_p; the best always stays.
    kept = (before < (top_p * totals)[:, None]) | (top_p >= 1)[:, None]
    kept &= (values >= kth) & (values >= min_p.log()[:, None])
    kept[:, 0] = True
    return values.gather(1, kept.sum(-1, keepdim=True) - 1).squeeze(1)


def _pick_of(values: Tensor, indices: Tensor, least: Tensor, keys: Tensor) -> Tensor:
    """The largest noisy logit among candidates at or above `least`; of equals the lowest vocabulary index."""
    noisy = torch.where(values >= least[:, None], values + gumbel(keys, indices), -torch.inf)
    best = noisy == noisy.amax(-1, keepdim=True)
    return torch.where(best, indices, torch.iinfo(torch.int64).max).amin(-1)


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural-log probabilities of the chosen tokens [rows] and of the `top` best ones.

    Returns the chosen tokens' [rows], then the best ones' values and ids [rows, top], best first.
    """
    if takes_triton(logits):
        from pagemill.kernels import sample_triton

        return sample_triton.token_logprobs(logits, tokens, top)
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    values, indices = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    return chosen, values, indices
