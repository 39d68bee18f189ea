"""Sampling: what the noise is, what filters keep, and that frequencies are the softmax's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pagemill.kernels import sample


def keys_for(seeds: range, sample_index: int = 0, position: int = 7) -> Tensor:
    return sample.noise_keys(list(seeds), [sample_index] * len(seeds), [position] * len(seeds))


def draw(
    logits: Tensor,
    keys: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    count = logits.shape[0]
    return sample.sample_tokens(
        logits,
        torch.full((count,), temperature),
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
        keys,
    )


# Noise


def hash_in_python(key: tuple[int, int], index: int) -> int:
    """The definition, in unbounded integers."""
    mask = 0xFFFFFFFF
    x = (index * 0x9E3779B1 + key[0]) & mask
    x ^= x >> 16
    x = (x * 0x7FEB352D) & mask
    x ^= key[1]
    x ^= x >> 15
    x = (x * 0x846CA68B) & mask
    return x ^ (x >> 16)


@given(st.integers(0, 2**64 - 1), st.integers(0, 7), st.integers(0, 2**20), st.integers(0, 2**18))
def test_the_hash_is_its_definition(seed: int, which: int, position: int, index: int) -> None:
    keys = sample.noise_keys([seed], [which], [position])
    words = [int(word) & 0xFFFFFFFF for word in keys[0]]
    bits = int(sample.noise_bits(keys, torch.tensor([[index]]))[0, 0]) & 0xFFFFFFFF
    assert bits == hash_in_python((words[0], words[1]), index)


FIXED_BITS = [
    [-10754162, -170029962, -202739298],
    [-1125594914, -1263985510, -1882942040],
    [-1885268793, 385299331, -602313102],
]


def test_the_noise_never_changes() -> None:
    """A change here would change every seeded answer ever given."""
    keys = sample.noise_keys([0, 1, 2**64 - 1], [0, 0, 3], [0, 5, 100_000])
    assert sample.noise_bits(keys, torch.tensor([[0, 1, 49_151]])).tolist() == FIXED_BITS


def test_noise_differs_by_each_of_its_arguments() -> None:
    base = ([5], [0], [9])
    others = [([6], [0], [9]), ([5], [1], [9]), ([5], [0], [10])]
    index = torch.arange(1000)[None]
    first = sample.noise_bits(sample.noise_keys(*base), index)
    for other in others:
        same = sample.noise_bits(sample.noise_keys(*other), index) == first
        assert int(same.sum()) <= 1


def test_gumbel_noise_has_its_distribution() -> None:
    noise = sample.gumbel(keys_for(range(64)), torch.arange(20_000)[None]).double().flatten()
    assert noise.isfinite().all()
    ordered = noise.sort().values
    expected = torch.exp(-torch.exp(-ordered))
    ranks = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is passed by one honest sample in a thousand.
    assert float((expected - ranks).abs().max()) < 1.95 / math.sqrt(len(ordered))


def test_neighbouring_rows_and_positions_are_uncorrelated() -> None:
    index = torch.arange(50_000)[None]
    for keys in (keys_for(range(8)), sample.noise_keys([3] * 8, [0] * 8, list(range(8)))):
        correlations = np.corrcoef(sample.gumbel(keys, index).numpy())
        assert np.abs(correlations - np.eye(8)).max() < 0.02


# Frequencies


def frequencies(tokens: Tensor, size: int) -> Tensor:
    return torch.bincount(tokens, minlength=size).double() / len(tokens)


def assert_drawn_from(tokens: Tensor, probabilities: Tensor) -> None:
    """Pearson's chi-squared, over tokens expected often enough for it; nothing impossible may occur."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities.double() * len(tokens)
    often = expected >= 5
    statistic = float(((counts - expected)[often] ** 2 / expected[often]).sum())
    degrees = int(often.sum()) - 1
    # Beyond mean + 5 sigma of the distribution.
    assert statistic < degrees + 5 * math.sqrt(2 * max(degrees, 1))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    tokens = draw(logits.expand(20_000, -1).clone(), keys_for(range(20_000)), temperature=temperature)
    assert_drawn_from(tokens, (logits / temperature).softmax(-1))


def test_positions_of_one_row_are_independent_draws() -> None:
    logits = torch.tensor([0.5, 1.5, -1.0, 0.0])
    keys = sample.noise_keys([42] * 20_000, [0] * 20_000, list(range(20_000)))
    tokens = draw(logits.expand(20_000, -1).clone(), keys)
    assert_drawn_from(tokens, logits.softmax(-1))
    pairs = tokens[:-1] * 4 + tokens[1:]
    assert_drawn_from(pairs, torch.outer(logits.softmax(-1), logits.softmax(-1)).flatten())


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (12, 0.8, 0.0), (12, 0.9, 0.05), (100, 0.999, 0.001)],
)
def test_filters_keep_what_transformers_keeps(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(60, generator=torch.Generator().manual_seed(2)) * 2
    expected = logits[None] / 0.8
    ids = torch.zeros(1, 1, dtype=torch.int64)
    if top_k:
        expected = TopKLogitsWarper(top_k)(ids, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(ids, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(ids, expected)
    many = logits.expand(20_000, -1).clone()
    tokens = draw(many, keys_for(range(20_000)), temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    assert_drawn_from(tokens, expected[0].softmax(-1))


# Filters at their edges


def test_top_p_zero_and_top_k_one_keep_the_best_alone() -> None:
    logits = torch.randn(500, 30)
    best = logits.argmax(-1)
    assert torch.equal(draw(logits, keys_for(range(500)), top_p=0.0), best)
    assert torch.equal(draw(logits, keys_for(range(500)), top_k=1), best)
    assert torch.equal(draw(logits, keys_for(range(500)), min_p=1.0), best)


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-30, 1e-45])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    logits = torch.randn(200, 1000) * 10
    assert torch.equal(draw(logits, keys_for(range(200)), temperature=temperature), logits.argmax(-1))
    filtered = draw(logits, keys_for(range(200)), temperature=temperature, top_p=0.9, top_k=50)
    assert torch.equal(filtered, logits.argmax(-1))


def test_a_huge_temperature_is_uniform() -> None:
    logits = torch.tensor([3.0, -2.0, 0.0, 9.0]).expand(20_000, -1).clone()
    assert_drawn_from(draw(logits, keys_for(range(20_000)), temperature=1e9), torch.full((4,), 0.25))


def test_banned_tokens_never_come() -> None:
    logits = torch.zeros(5000, 8)
    logits[:, [2, 5]] = -torch.inf
    for options in ({}, {"top_k": 8}, {"top_p": 0.999}, {"min_p": 0.01}):
        tokens = draw(logits.clone(), keys_for(range(5000)), **options)  # type: ignore[arg-type]
        assert not {2, 5} & set(tokens.tolist())


def test_a_top_k_beyond_the_vocabulary_keeps_all() -> None:
    logits = torch.randn(300, 20)
    assert torch.equal(
        draw(logits, keys_for(range(300)), top_k=1000), draw(logits, keys_for(range(300)), top_k=20)
    )


# Large vocabularies go through several windows of candidates


def in_one_window(logits: Tensor, keys: Tensor, monkeypatch: pytest.MonkeyPatch, **options: float) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(sample, "_of_best_blocks", lambda scaled: None)
        patch.setattr(sample, "_of_wide_window", lambda scaled: None)
        return draw(logits, keys, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [9_000, 10_007])
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 8.0])
def test_windows_choose_what_a_full_sort_chooses(
    size: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(24, size, generator=torch.Generator().manual_seed(3)) * spread
    keys = keys_for(range(24))
    for options in (
        {"top_k": 20}, {"top_k": 700}, {"top_k": 5000}, {"top_p": 0.3}, {"top_p": 0.95}, {"min_p": 0.1},
        {"top_k": 300, "top_p": 0.9, "min_p": 0.01},
    ):  # fmt: skip
        whole = in_one_window(logits, keys, monkeypatch, **options)
        assert torch.equal(draw(logits, keys, **options), whole), options  # type: ignore[arg-type]


def test_ties_at_the_border_of_a_window_stay_in(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(8, 9_000)
    logits[:, ::3] = 1.0
    keys = keys_for(range(8))
    for options in ({"top_k": 10}, {"top_k": 256}, {"top_k": 2000}):
        whole = in_one_window(logits, keys, monkeypatch, **options)
        assert torch.equal(draw(logits, keys, **options), whole)  # type: ignore[arg-type]
        assert bool((whole % 3 == 0).all())


# A row alone


def test_a_row_draws_the_same_whoever_is_beside_it() -> None:
    logits = torch.randn(40, 9_000) * 3
    options = torch.Generator().manual_seed(4)
    temperature = torch.rand(40, generator=options) + 0.1
    top_k = torch.randint(0, 3, (40,), generator=options) * 400
    top_p = (
        torch.rand(40, generator=options).clamp(max=0.9) + torch.randint(0, 2, (40,), generator=options) * 0.1
    )
    min_p = torch.randint(0, 2, (40,), generator=options) * 0.05
    keys = keys_for(range(40))
    together = sample.sample_tokens(logits, temperature, top_k, top_p, min_p, keys)
    for i in range(40):
        one = slice(i, i + 1)
        alone = sample.sample_tokens(
            logits[one], temperature[one], top_k[one], top_p[one], min_p[one], keys[one]
        )
        assert int(alone) == int(together[i])


def test_best_tokens_are_the_first_of_the_best() -> None:
    logits = torch.randn(20, 300)
    assert torch.equal(sample.best_tokens(logits), logits.argmax(-1))
    assert sample.best_tokens(torch.zeros(2, 5)).tolist() == [0, 0]


# Penalties and logprobs


def test_penalties_follow_their_definitions() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.5]])
    prompt = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0]])
    output = torch.tensor([[0.0, 3, 0, 0], [0, 0, 1, 0]])
    sample.apply_penalties(
        logits, prompt, output, torch.tensor([0.5, 0.25]), torch.tensor([0.1, 0.0]), torch.tensor([2.0, 1.0])
    )
    expected = [[1.0, -4.0 - 0.5 - 0.3, 1.0, 0.5], [2.0, -2.0, 0.75, 0.5]]
    torch.testing.assert_close(logits, torch.tensor(expected))


def test_the_repetition_penalty_is_transformers() -> None:
    logits, ids = torch.randn(3, 50), torch.randint(0, 50, (3, 12))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    rows = torch.arange(3).repeat_interleave(12)
    counts = sample.count_tokens(rows, ids.flatten(), 3, 50)
    zero = torch.zeros(3)
    sample.apply_penalties(logits, counts, torch.zeros(3, 50), zero, zero, torch.full((3,), 1.3))
    torch.testing.assert_close(logits, expected)


def test_logprobs_are_the_log_softmax_best_first() -> None:
    logits = torch.randn(4, 100)
    own, values, ids = sample.token_logprobs(logits, torch.tensor([3, 1, 4, 15]), 5)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(own, expected[torch.arange(4), [3, 1, 4, 15]])
    torch.testing.assert_close(values, expected.gather(1, ids))
    assert torch.equal(values, values.sort(-1, descending=True).values)
    assert sample.token_logprobs(logits, torch.tensor([0, 0, 0, 0]), 0)[1].shape == (4, 0)
