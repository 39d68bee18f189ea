"""Sampling in Triton against the torch form, which sorts: the same noise, the same tokens."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from pagemill.kernels import sample, sample_triton
from pagemill.kernels.sample_triton_kernel import gumbel, noise_bits

pytestmark = pytest.mark.usefixtures("poisoned")

Options = dict[str, float]


@triton.jit
def _noise_kernel(keys, indices, bits, noise, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    inside = at < count
    index = tl.load(indices + at, mask=inside, other=0)
    first = tl.load(keys).to(tl.uint32, bitcast=True)
    second = tl.load(keys + 1).to(tl.uint32, bitcast=True)
    tl.store(bits + at, noise_bits(first, second, index).to(tl.int32, bitcast=True), mask=inside)
    tl.store(noise + at, gumbel(first, second, index), mask=inside)


def test_the_noise_is_that_of_the_torch_form(device: torch.device) -> None:
    keys = sample.noise_keys([2**64 - 3], [2], [77])
    # The indices of the largest and the smallest u among many too, where logarithms lose digits.
    many = torch.arange(1 << 20)[None]
    u = sample.noise_bits(keys, many)[0] & 0x7FFFFFFF
    indices = torch.cat([many[0, :500], many[0, -500:], u.argsort()[:12], u.argsort()[-12:]])
    bits = torch.empty(len(indices), dtype=torch.int32, device=device)
    noise = torch.empty(len(indices), device=device)
    words = indices.to(torch.int32).to(device)
    _noise_kernel[(1,)](keys.to(device), words, bits, noise, len(indices), BLOCK=1024)
    assert torch.equal(bits.cpu()[None], sample.noise_bits(keys, indices[None]))
    torch.testing.assert_close(noise.cpu()[None], sample.gumbel(keys, indices[None]), rtol=2e-6, atol=2e-6)


def chosen(device: torch.device, logits: Tensor, options: Options, seeds: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens of both forms; the native one gets logits with gaps between its rows."""
    rows, vocabulary = logits.shape
    keys = sample.noise_keys(list(range(seeds, seeds + rows)), [0] * rows, [9] * rows)
    filters = (
        torch.full((rows,), options.get("temperature", 1.0)),
        torch.full((rows,), int(options.get("top_k", 0))),
        torch.full((rows,), options.get("top_p", 1.0)),
        torch.full((rows,), options.get("min_p", 0.0)),
        keys,
    )
    gapped = torch.full((rows, vocabulary + 3), float("nan"), device=device)[:, :vocabulary]
    gapped.copy_(logits)
    found = sample_triton.sample_tokens(gapped, *(f.to(device) for f in filters))
    return found.cpu(), sample.sample_tokens(logits.clone(), *filters)


CASES: list[Options] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.4},
    {"temperature": 1e-30},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 700},
    {"top_k": 100_000},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.95, "temperature": 0.7},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 300, "top_p": 0.9},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
    {"top_p": 0.8, "min_p": 0.01},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize(("rows", "vocabulary", "spread"), [(2, 4_501, 3.0), (1, 2_100, 0.3), (3, 37, 2.0)])
def test_tokens_are_those_of_the_torch_form(
    device: torch.device, options: Options, rows: int, vocabulary: int, spread: float
) -> None:
    found, expected = chosen(device, torch.randn(rows, vocabulary) * spread, options)
    assert torch.equal(found, expected)


def test_fresh_numbers_each_time(device: torch.device, fresh: int) -> None:
    vocabulary = int(torch.randint(2, 5_000, ()))
    for options in ({}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}, {"top_p": 0.95, "temperature": 0.8}):
        found, expected = chosen(device, torch.randn(2, vocabulary) * 3, options, fresh)
        assert torch.equal(found, expected)


def test_one_token_is_chosen_whatever_its_logit(device: torch.device) -> None:
    for options in ({}, {"temperature": 0.0}, {"top_k": 50, "top_p": 0.9, "min_p": 0.05}):
        assert chosen(device, torch.tensor([[-3.0], [1e4]]), options)[0].tolist() == [0, 0]


def test_no_rows_give_nothing(device: torch.device) -> None:
    logits = torch.empty(0, 50, device=device)
    assert sample_triton.best_tokens(logits).shape == (0,)
    own, values, ids = sample_triton.token_logprobs(logits, torch.empty(0, dtype=torch.int64), 5)
    assert [own.shape, values.shape, ids.shape] == [(0,), (0, 5), (0, 5)]


@pytest.mark.parametrize(
    "options", [{"top_k": 10}, {"top_p": 0.5}, {"min_p": 0.2}, {"temperature": 0.0}], ids=str
)
def test_ties_stay_in_together_and_the_lowest_index_wins_without_noise(
    device: torch.device, options: Options
) -> None:
    logits = torch.zeros(3, 4_200)
    logits[:, ::7] = 1.5
    found, expected = chosen(device, logits, options)
    assert torch.equal(found, expected)
    if "temperature" in options:
        assert found.tolist() == [0] * 3


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 30}, {"top_p": 0.99, "top_k": 2_000}], ids=str)
def test_rows_with_more_candidates_than_there_is_room_are_searched_whole(
    device: torch.device, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_triton, "ROOM", 16)
    found, expected = chosen(device, torch.randn(2, 2_500), options, seeds=40)
    assert torch.equal(found, expected)


def test_banned_tokens_never_come(device: torch.device) -> None:
    logits = torch.full((2, 4_200), -torch.inf)
    logits[:, 4_111:4_115] = torch.randn(2, 4)
    for options in ({}, {"top_k": 100}, {"top_p": 0.999}, {"min_p": 1e-6}, {"temperature": 0.0}):
        found, expected = chosen(device, logits, options)
        assert torch.equal(found, expected)
        assert bool(((found >= 4_111) & (found < 4_115)).all())


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy's, interpreted
def test_a_broken_row_gives_some_token_and_breaks_no_other(device: torch.device) -> None:
    logits = torch.randn(3, 300)
    logits[1] = float("nan")
    for options in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}):
        found, _ = chosen(device, logits, options)
        alone, _ = chosen(device, logits[:1], options)
        assert bool(((found >= 0) & (found < 300)).all())
        assert int(found[0]) == int(alone[0])


def test_rows_of_every_kind_go_together(device: torch.device) -> None:
    rows = len(CASES)
    logits = torch.randn(rows, 4_500) * 2
    columns = [("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)]
    filters = [torch.tensor([case.get(name, off) for case in CASES]) for name, off in columns]
    filters[1] = filters[1].long()
    keys = sample.noise_keys(list(range(rows)), [1] * rows, list(range(rows)))
    expected = sample.sample_tokens(logits.clone(), *filters, keys)
    on_device = [f.to(device) for f in (logits, *filters, keys)]
    assert torch.equal(sample_triton.sample_tokens(*on_device).cpu(), expected)
    assert sample_triton.sample_tokens(*(f[:0] for f in on_device)).shape == (0,)


def test_best_tokens_are_the_first_of_the_best(device: torch.device) -> None:
    logits = torch.randn(5, 4_300).round(decimals=1)
    assert torch.equal(sample_triton.best_tokens(logits.to(device)).cpu(), sample.best_tokens(logits))
    assert sample_triton.best_tokens(torch.zeros(2, 5, device=device)).tolist() == [0, 0]


@pytest.mark.parametrize(("vocabulary", "top"), [(4_500, 5), (4_500, 0), (300, 20), (7, 20)])
@pytest.mark.parametrize("room", [4, 8192])
def test_logprobs_are_those_of_the_torch_form(
    device: torch.device, vocabulary: int, top: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_triton, "ROOM", room)
    logits, tokens = torch.randn(3, vocabulary) * 4, torch.randint(0, vocabulary, (3,))
    found = sample_triton.token_logprobs(logits.to(device), tokens.to(device), top)
    own, values, ids = (part.cpu() for part in found)
    expected = sample.token_logprobs(logits, tokens, top)
    torch.testing.assert_close(own, expected[0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(values, expected[1], rtol=2e-6, atol=2e-6)
    assert torch.equal(ids, expected[2])


def test_of_equal_logprobs_the_lower_id_comes_first(device: torch.device) -> None:
    logits = torch.zeros(2, 4_200, device=device)
    logits[:, 4_150:4_153] = 1.0
    _, _, ids = sample_triton.token_logprobs(logits, torch.tensor([0, 4_150], device=device), 5)
    assert ids.tolist() == [[4_150, 4_151, 4_152, 0, 1]] * 2
