"""Dense layers in Triton whose sums have one order, against torch and against themselves."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels.linear_invariant import FixedTileLinear

pytestmark = pytest.mark.usefixtures("poisoned")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def layer(
    device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, biased: bool
) -> FixedTileLinear:
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs, dtype=dtype, device=device) / inputs**0.5
    return FixedTileLinear(weight, torch.randn(outputs, dtype=dtype, device=device) if biased else None)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(0, 16, 16), (1, 70, 33), (65, 64, 130), (130, 17, 64)]
)
def test_products_are_those_of_torch(
    device: torch.device, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    for biased in (False, True):
        linear = layer(device, dtype, outputs, inputs, biased)
        x = torch.randn(rows, inputs, dtype=dtype, device=device)
        expected = x.double() @ linear.weight.double().T
        expected += 0 if linear.bias is None else linear.bias.double()
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(linear(x).double(), expected, rtol=tolerance, atol=tolerance)
        residual = torch.ones(rows, outputs, dtype=dtype, device=device)
        linear.add_to(residual, x)
        torch.testing.assert_close(residual, linear(x) + 1)


@pytest.mark.usefixtures("rows_one_by_one")
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_row_is_the_same_to_the_last_bit_wherever_it_stands(
    device: torch.device, dtype: torch.dtype
) -> None:
    linear = layer(device, dtype, 48, 200, True)
    x = torch.randn(150, 200, dtype=dtype, device=device)
    whole = linear(x)
    for begin, end in ((0, 1), (149, 150), (3, 70), (64, 128)):
        assert torch.equal(linear(x[begin:end]), whole[begin:end])
