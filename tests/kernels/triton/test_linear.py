"""Dense layers in 8 bits in Triton against the torch forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagemill.kernels import linear_triton
from pagemill.kernels.eight_bits import round_rows
from pagemill.kernels.linear_fp8 import FP8, Fp8Linear
from pagemill.kernels.linear_int8 import Int8Linear, block_of, quantize_rows, rotate

pytestmark = pytest.mark.usefixtures("poisoned")

DTYPES = [torch.float32, torch.float16]


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(), right.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 96, 576, 1024])
def test_rows_are_rotated_and_rounded_to_the_same_bits(
    device: torch.device, dtype: torch.dtype, width: int
) -> None:
    x = torch.randn(6, 2, width).to(dtype)[:, 1]
    x[1] = 0
    x[2, -1] = float("nan")
    x[3, 0] = float("inf")
    expected, expected_scales = quantize_rows(rotate(x, block_of(width)))
    values, scales = linear_triton.round_rows(x.to(device), torch.int8, block_of(width))
    assert torch.equal(values.cpu(), expected)
    assert same_bits(scales.cpu(), expected_scales)


@pytest.mark.parametrize("width", [5, 300])
def test_rows_of_fp8_are_those_of_the_plain_form(device: torch.device, width: int) -> None:
    x = torch.randn(5, width) * torch.tensor([[1e-3], [1.0], [1e4], [0.0], [1e-31]])
    expected, expected_scales = round_rows(x, FP8)
    values, scales = linear_triton.round_rows(x.to(device), FP8, 1)
    assert torch.equal(values.cpu().view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales.cpu(), expected_scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (40, 200), (7, 16), (33, 257)])
def test_int8_gives_the_bits_of_the_reference(
    device: torch.device, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    reference = Int8Linear(weight, bias, route="float")
    layer = Int8Linear(weight.to(device), bias.to(device), route="triton")
    for rows in (0, 1, 17, 70):
        x = torch.randn(rows, inputs + 3).to(dtype)[:, :inputs]
        if rows > 1:
            x[1, 0] = float("nan")
        assert same_bits(layer(x.to(device)).cpu(), reference(x)), rows


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("dtype", DTYPES)
def test_fresh_numbers_each_time(device: torch.device, dtype: torch.dtype) -> None:
    inputs = int(torch.randint(1, 300, ()))
    test_int8_gives_the_bits_of_the_reference(device, dtype, 20, inputs)
    test_fp8_is_its_plain_form(device, dtype, 20, inputs, 5)


def test_the_largest_integers_do_not_saturate(device: torch.device) -> None:
    values = torch.full((16, 300), 127, dtype=torch.int8)
    layer = linear_triton.Layer(values.to(device), torch.ones(16).to(device), torch.zeros(16).to(device), 1)
    # One scale of 1: the numbers are the integers themselves.
    found = layer(torch.full((3, 300), -127.0, device=device))
    assert (found == -127.0 * 127.0 * 300).all()


def test_a_row_has_the_same_bits_beside_any_rows(device: torch.device) -> None:
    layer = Int8Linear(torch.randn(40, 96).to(device), route="triton")
    x = torch.randn(70, 96, device=device)
    together = layer(x)
    for row in (0, 33, 69):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (33, 257)])
@pytest.mark.parametrize("rows", [0, 1, 20])
def test_fp8_is_its_plain_form(
    device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, rows: int
) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card does not multiply 8-bit floats")
    plain = Fp8Linear(torch.randn(outputs, inputs), torch.randn(outputs))
    layer = linear_triton.Layer(*(part.to(device) for part in (plain.values, plain.scales, plain.bias)), 1)
    x = torch.randn(rows, inputs).to(dtype)
    if rows > 1:
        x[1, 0] = float("inf")
    found, expected = layer(x.to(device)).cpu(), plain(x)
    assert found.dtype == dtype
    assert torch.equal(found.isnan(), expected.isnan())
    eps = 1e-5 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(found.nan_to_num(), expected.nan_to_num(), rtol=eps, atol=10 * eps)


def test_fp8_is_near_the_whole_product() -> None:
    weight, x = torch.randn(64, 256), torch.randn(9, 256)
    whole = x @ weight.T
    found = Fp8Linear(weight)(x)
    # Each factor is rounded to 3 bits: 2^-4 at most, about a third of it on the mean, in sums of 256.
    assert float((found - whole).norm() / whole.norm()) < 0.05
    residual = torch.zeros(9, 64)
    Fp8Linear(weight).add_to(residual, x)
    assert torch.equal(residual, found)
