"""Sampling against float64, which sorts.

Whether the token is the right one is asked of its score and not of its number: two tokens whose noisy logits
differ by less than float32 can hold may change places, and so may those at a filter's border.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gpu_check.case import Case, Results, Trial
from gpu_check.compare import EXACT, Tolerance
from gpu_check.setting import Setting
from pagemill.kernels import sample_triton
from pagemill.kernels.sample import COLDEST, noise_bits, noise_keys

OPTIONS: tuple[Mapping[str, float], ...] = (
    {},
    {"temperature": 0.4},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 700},
    {"top_k": 10_000_000},
    {"top_p": 0.3},
    {"top_p": 0.95, "temperature": 0.7},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"top_k": 300, "top_p": 0.9},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
    {"top_p": 0.8, "min_p": 0.01},
    {"top_p": 0.0},
)
# How near to a filter's border a token may lie on either side, and a noisy logit to the best.
BORDER, SCORE = 1e-5, 1e-4


def cases(setting: Setting) -> Iterator[Case]:
    if setting.dry:
        yield _tokens(300, 3.0, [OPTIONS[1], OPTIONS[12]])
        yield _logprobs(40, 2, rows=1)
        return
    for vocabulary in (37, 4_501, 49_152, 128_256, 262_144):
        for spread in (0.3, 3.0, 12.0):
            yield _tokens(vocabulary, spread, list(OPTIONS) * 4)
        yield _best(vocabulary)
        yield _logprobs(vocabulary, 20, rows=64)


def random_logits(random: torch.Generator, rows: int, vocabulary: int, spread: float) -> Tensor:
    """Rows with gaps between them that hold NaN."""
    whole = torch.full((rows, vocabulary + 8), torch.nan, device=random.device)
    logits = whole[:, :vocabulary]
    return logits.copy_(torch.randn(logits.shape, generator=random, device=random.device) * spread)


def filters_of(options: list[Mapping[str, float]], seed: int, device: torch.device) -> tuple[Tensor, ...]:
    """Temperature, top_k, top_p, min_p and keys of as many rows."""
    columns = (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    found = [torch.tensor([float(row.get(name, off)) for row in options]) for name, off in columns]
    found[1] = found[1].long()
    rows = len(options)
    keys = noise_keys([seed + row for row in range(rows)], [row % 3 for row in range(rows)], range(rows))
    return tuple(part.to(device) for part in (*found, keys))


def _tokens(vocabulary: int, spread: float, options: list[Mapping[str, float]]) -> Case:
    def make(random: torch.Generator) -> Trial:
        logits = random_logits(random, len(options), vocabulary, spread)
        filters = filters_of(options, random.initial_seed() % 2**40, random.device)

        def run() -> Results:
            tokens = sample_triton.sample_tokens(logits, *filters)
            return (shortfall(logits, filters, tokens),)

        nothing = torch.zeros(len(options), dtype=torch.float64)
        return Trial(run, lambda: (nothing,), [Tolerance(0.0, SCORE, 0.0)])

    return Case(f"sample: {vocabulary}, {len(options)} rows of spread {spread:g}", make)


def shortfall(logits: Tensor, filters: tuple[Tensor, ...], tokens: Tensor) -> Tensor:
    """How far each token's noisy score lies below the best that its filters keep, by the score's size.

    float64 [rows]; NaN for what is no token, infinite for one that the filters drop.
    """
    temperature, top_k, top_p, min_p, keys = filters
    vocabulary = logits.shape[1]
    known = (tokens >= 0) & (tokens < vocabulary)
    at = tokens.clamp(0, vocabulary - 1)[:, None]
    wide = logits.double()
    scaled = (wide - wide.amax(-1, keepdim=True)) / temperature.double().clamp(min=COLDEST)[:, None]
    surely, perhaps = (least_kept(scaled, top_k, top_p, min_p, slack) for slack in (-BORDER, BORDER))
    index = torch.arange(vocabulary, device=logits.device)[None]
    noise = torch.where(temperature[:, None] > 0, _gumbel(keys, index), 0.0)
    noisy = scaled + noise
    best = torch.where(scaled >= surely[:, None], noisy, -torch.inf).amax(-1)
    mine = noisy.gather(1, at).squeeze(1)
    found = ((best - mine) / (1 + best.abs())).clamp(min=0.0)
    found = torch.where(scaled.gather(1, at).squeeze(1) < perhaps, torch.inf, found)
    return torch.where(known, found, torch.nan)


def least_kept(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, slack: float) -> Tensor:
    """The smallest scaled logit that all filters keep, float64 [rows]; slack: by how much they keep more."""
    values = scaled.sort(dim=-1, descending=True).values
    vocabulary = values.shape[1]
    limit = torch.where(top_k > 0, top_k.clamp(max=vocabulary), vocabulary)
    kth = values.gather(1, (limit - 1)[:, None])
    masses = torch.where(values >= kth, values.exp(), 0.0)
    before = masses.cumsum(-1) - masses
    enough = top_p.double()[:, None] * masses.sum(-1, keepdim=True) * (1 + slack)
    kept = (before < enough) | (top_p >= 1)[:, None]
    # min-p of 0 keeps all: its logarithm is -inf.
    kept &= (values >= kth) & (values >= min_p.double().log()[:, None] - slack)
    kept[:, 0] = True
    return values.gather(1, kept.sum(-1, keepdim=True) - 1).squeeze(1) - max(slack, 0.0)


def _gumbel(keys: Tensor, index: Tensor) -> Tensor:
    """Of the same float32 numbers between 0 and 1 as the kernel's, the logarithms in float64."""
    uniform = (noise_bits(keys, index) & 0x7FFFFFFF).float()
    uniform = uniform.add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24).double()
    return -torch.log(-torch.log1p(-uniform))


def _best(vocabulary: int) -> Case:
    def make(random: torch.Generator) -> Trial:
        # Rounded, so that many are the best: the first of them counts.
        logits = random_logits(random, 9, vocabulary, 3.0).round(decimals=1)

        def expected() -> Results:
            index = torch.arange(vocabulary, device=logits.device)
            best = logits == logits.amax(-1, keepdim=True)
            return (torch.where(best, index, vocabulary).amin(-1),)

        return Trial(lambda: (sample_triton.best_tokens(logits),), expected, [EXACT])

    return Case(f"best_tokens: {vocabulary}", make)


def _logprobs(vocabulary: int, top: int, rows: int) -> Case:
    def make(random: torch.Generator) -> Trial:
        logits = random_logits(random, rows, vocabulary, 4.0)
        tokens = torch.randint(0, vocabulary, (rows,), generator=random, device=random.device)

        def expected() -> Results:
            logprobs = logits.double().log_softmax(-1)
            # Of equal logits the lower id comes first.
            ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
            return logprobs.gather(1, tokens[:, None]).squeeze(1), logprobs.gather(1, ids), ids

        near = Tolerance(1e-5, 1e-5, 1e-5)
        return Trial(lambda: sample_triton.token_logprobs(logits, tokens, top), expected, [near, near, EXACT])

    return Case(f"token_logprobs: {vocabulary}, {top} best", make)
