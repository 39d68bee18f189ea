"""Shaping of logits in Triton against its torch form."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels import shape_logits_triton
from pagemill.kernels.shape_logits import IN_PROMPT, Shaping, shape_logits_torch

pytestmark = pytest.mark.usefixtures("poisoned")


def random_shaping(device: torch.device, slots: int, vocabulary: int, biases: int, ends: int) -> Shaping:
    def some(count: int) -> torch.Tensor:
        found = torch.stack([torch.randperm(vocabulary)[:count] for _ in range(slots)]).to(torch.int32)
        found[torch.rand(found.shape) < 0.3] = -1
        return found.to(device)

    plain = (torch.arange(slots) % 3 == 0).to(device)
    output = torch.randint(-3, 4, (slots, vocabulary), dtype=torch.int32, device=device).clamp(min=0)
    prompt = torch.randint(0, 2, (slots, vocabulary), dtype=torch.int32, device=device)
    return Shaping(
        output + prompt * IN_PROMPT,
        torch.randn(slots, device=device) * ~plain,
        torch.randn(slots, device=device) * ~plain,
        torch.where(plain, 1.0, 0.5 + torch.rand(slots, device=device)),
        some(biases),
        torch.randn(slots, biases, device=device),
        some(ends),
        torch.randint(0, 2, (slots,), dtype=torch.int32, device=device) * 5,
        torch.full((slots,), 4, dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize(
    ("vocabulary", "biases", "ends"), [(1, 1, 1), (37, 5, 3), (4_100, 40, 1), (300, 0, 0)]
)
def test_it_is_the_torch_form(device: torch.device, vocabulary: int, biases: int, ends: int) -> None:
    shaping = random_shaping(device, 7, vocabulary, biases, ends)
    whole = torch.randn(4, 2, vocabulary, device=device)
    neighbour, expected = whole[:, 1].clone(), whole[:, 0].clone()
    slots = torch.tensor([5, -1, 0, 4], device=device)
    shape_logits_torch(expected, slots, shaping)
    shape_logits_triton.shape_logits(whole[:, 0], slots, shaping)
    torch.testing.assert_close(whole[:, 0], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(whole[:, 1], neighbour)


@pytest.mark.usefixtures("fresh")
def test_fresh_numbers_each_time(device: torch.device) -> None:
    test_it_is_the_torch_form(device, int(torch.randint(20, 5_000, ())), 10, 4)


def test_no_rows_are_no_launch(device: torch.device) -> None:
    shaping = random_shaping(device, 2, 9, 2, 2)
    shape_logits_triton.shape_logits(
        torch.empty(0, 9, device=device), torch.empty(0, dtype=torch.int64), shaping
    )
