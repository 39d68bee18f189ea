"""RMSNorm in Triton against its torch form."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels import norm_triton
from pagemill.kernels.norm import rms_norm_torch

pytestmark = pytest.mark.usefixtures("poisoned")

# Interpreted, a number is cut to bfloat16 and not rounded.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    # One unit in the last place: the sum of squares has another order.
    return {"rtol": 2e-6 if dtype is torch.float32 else torch.finfo(dtype).eps, "atol": 1e-6}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 1), (1, 64), (3, 577), (5, 2304)])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_it_is_the_torch_form(
    device: torch.device, dtype: torch.dtype, rows: int, width: int, wide_weight: bool
) -> None:
    x = torch.randn(rows, 2, width, device=device).to(dtype)[:, 1]
    weight = torch.randn(width, device=device).to(torch.float32 if wide_weight else dtype)
    found = norm_triton.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found, rms_norm_torch(x, weight, 1e-5), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_vector_of_a_token_has_its_weight_in_a_view_with_gaps(
    device: torch.device, dtype: torch.dtype
) -> None:
    x = torch.randn(4, 7, 80, device=device).to(dtype)[:, 1:5]
    weight = torch.randn(4, 80, device=device).to(dtype)
    found = norm_triton.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(found, rms_norm_torch(x, weight, 1e-6), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 96), (4, 131)])
def test_a_sum_and_its_norm_are_the_two_steps(
    device: torch.device, dtype: torch.dtype, inner: bool, wide_weight: bool, rows: int, width: int
) -> None:
    # Rows with gaps, and a neighbour that must not be touched.
    whole = torch.randn(rows, 2, width, device=device).to(dtype)
    x = torch.randn(rows, 3, width, device=device).to(dtype)[:, 1]
    weights = torch.randn(2, width, device=device).to(torch.float32 if wide_weight else dtype)
    added = rms_norm_torch(x, weights[0], 1e-6) if inner else x
    expected = whole[:, 0] + added
    neighbour = whole[:, 1].clone()
    found = norm_triton.add_rms_norm(whole[:, 0], x, weights[1], 1e-6, weights[0] if inner else None)
    torch.testing.assert_close(whole[:, 0], expected, **tolerance(dtype))
    torch.testing.assert_close(found, rms_norm_torch(whole[:, 0], weights[1], 1e-6), **tolerance(dtype))
    assert torch.equal(whole[:, 1], neighbour)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("dtype", DTYPES)
def test_fresh_numbers_each_time(device: torch.device, dtype: torch.dtype) -> None:
    width = int(torch.randint(1, 300, ()))
    test_it_is_the_torch_form(device, dtype, 3, width, True)
    test_a_sum_and_its_norm_are_the_two_steps(device, dtype, True, False, 3, width)


def test_a_broken_row_breaks_no_other(device: torch.device) -> None:
    x, weight = torch.randn(3, 40, device=device), torch.ones(40, device=device)
    alone = norm_triton.rms_norm(x[:1], weight, 1e-6)
    x[1, 3] = float("nan")
    found = norm_triton.rms_norm(x, weight, 1e-6)
    assert found[1].isnan().all()
    assert torch.equal(found[:1], alone)
