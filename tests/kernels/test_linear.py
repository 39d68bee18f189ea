"""Packed dense layers: the right numbers, and the same ones whatever the number of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill.kernels.linear import Linear, can_pack


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_a_linear_layer(dtype: torch.dtype, bias: bool) -> None:
    weight = torch.randn(48, 32).to(dtype)
    offset = torch.randn(48).to(dtype) if bias else None
    x = torch.randn(5, 32).to(dtype)
    expected = F.linear(x.float(), weight.float(), None if offset is None else offset.float())
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(Linear(weight, offset)(x).float(), expected, rtol=tolerance, atol=tolerance)


def test_float32_is_packed_on_cpu() -> None:
    assert can_pack(torch.randn(8, 8))
    assert not can_pack(torch.randn(8, 8, dtype=torch.float64))


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (960, 576), (576, 1536)])
def test_a_row_is_the_same_beside_any_number_of_rows(
    outputs: int, inputs: int, assert_same: Callable[[Tensor, Tensor], None]
) -> None:
    linear = Linear(torch.randn(outputs, inputs))
    x = torch.randn(130, inputs)
    together = linear(x)
    for count in (1, 2, 3, 5, 16, 31, 64, 129):
        assert_same(linear(x[:count].clone()), together[:count])
        assert_same(linear(x[-count:].clone()), together[-count:])


def test_no_rows_are_no_error() -> None:
    assert Linear(torch.randn(8, 4))(torch.randn(0, 4)).shape == (0, 8)
