"""Compiled dense layers against float64, and the promise that a row's bits are its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from pagemill.kernels import linear_cpu
from pagemill.kernels.linear import GatedLinear, Linear


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 64, 96, 97, 200])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 4), (48, 64), (32, 388), (16, 1536)])
def test_it_is_a_linear_layer(rows: int, outputs: int, inputs: int) -> None:
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    expected = F.linear(x.double(), weight.double(), bias.double())
    got = linear_cpu.linear(x, linear_cpu.pack(weight), bias)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5 * inputs**0.5)


def test_rows_of_a_wider_matrix_are_read_where_they_lie() -> None:
    wide, weight = torch.randn(9, 100), torch.randn(16, 64)
    panels, x = linear_cpu.pack(weight), wide[:, 20:84]
    torch.testing.assert_close(linear_cpu.linear(x, panels, None), x @ weight.T)
    columns = x.t().contiguous().t()
    torch.testing.assert_close(linear_cpu.linear(columns, panels, None), x @ weight.T)


@pytest.mark.parametrize("bias", [False, True])
def test_it_adds_to_a_residual(bias: bool) -> None:
    weight, offset = torch.randn(48, 64), torch.randn(48) if bias else None
    layer, x, residual = Linear(weight, offset), torch.randn(7, 64), torch.randn(7, 48)
    expected = residual + layer(x)
    layer.add_to(residual, x)
    assert layer.compiled is not None
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inner", [48, 40])  # the second is gated after its layers
def test_a_gated_pair_is_silu_of_one_times_the_other(inner: int, bias: bool) -> None:
    gate, up = torch.randn(inner, 64), torch.randn(inner, 64)
    biases = (torch.randn(inner), torch.randn(inner)) if bias else (None, None)
    x = torch.randn(70, 64)
    layer = GatedLinear(gate, up, *biases)
    expected = F.silu(F.linear(x, gate, biases[0])) * F.linear(x, up, biases[1])
    assert (Linear.gated(gate, up, None) is None) == (inner == 40)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-4)


def test_silu_holds_for_any_gate() -> None:
    gates = torch.tensor([-1e30, -1e4, -100.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 100.0, 1e4, 1e30]).view(-1, 1)
    x = torch.cat([gates, torch.ones(len(gates), 1), torch.zeros(len(gates), 2)], 1)
    gate, up = torch.zeros(16, 4), torch.zeros(16, 4)
    gate[:, 0] = 1
    up[:, 1] = 1
    got = GatedLinear(gate, up)(x)
    torch.testing.assert_close(got[:, 0].double(), F.silu(gates[:, 0].double()), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_beside_any_rows_on_any_number_of_threads(threads: int) -> None:
    gate, up, down = torch.randn(64, 200), torch.randn(64, 200), torch.randn(208, 64)
    gated, linear = GatedLinear(gate, up), Linear(down)
    x = torch.randn(220, 200)
    together = linear(gated(x))
    torch.set_num_threads(threads)
    for begin, end in [(0, 1), (3, 5), (7, 10), (0, 4), (5, 10), (100, 107), (0, 96), (1, 220)]:
        assert torch.equal(linear(gated(x[begin:end])), together[begin:end])


def test_a_broken_row_breaks_itself_alone() -> None:
    linear = Linear(torch.randn(32, 64))
    x = torch.randn(9, 64)
    before = linear(x)
    x[4, 3], x[8, 0] = torch.nan, torch.inf
    after = linear(x)
    whole = [0, 1, 2, 3, 5, 6, 7]
    assert torch.equal(after[whole], before[whole])
    assert after[4].isnan().all()
    assert not after[8].isfinite().any()


def test_what_it_cannot_serve_is_named() -> None:
    assert "40 outputs" in str(linear_cpu.refusal(torch.randn(40, 64)))
    assert "6 inputs" in str(linear_cpu.refusal(torch.randn(32, 6)))
    assert "float32" in str(linear_cpu.refusal(torch.randn(32, 64).bfloat16()))


def test_no_rows_are_no_error() -> None:
    assert Linear(torch.randn(16, 8))(torch.randn(0, 8)).shape == (0, 16)
