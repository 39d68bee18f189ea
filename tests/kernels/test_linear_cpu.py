"""Compiled dense layers against float64, and the promise that a row's bits are its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill.kernels import cpu_vector, linear_cpu
from pagemill.kernels.linear import GatedLinear, Linear


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# float32, and bfloat16 as this CPU multiplies it and as one does that has no instruction for it.
@pytest.fixture(params=["float32", "bfloat16", "bfloat16 widened"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    if request.param == "bfloat16 widened":
        if not cpu_vector.multiplies_bf16():
            pytest.skip("this CPU has no other way")
        monkeypatch.setattr(cpu_vector, "multiplies_bf16", lambda: False)
    linear_cpu._code.cache_clear()
    yield torch.float32 if request.param == "float32" else torch.bfloat16
    linear_cpu._code.cache_clear()


def close(got: Tensor, expected: Tensor) -> None:
    """As near as a result in its dtype can be; expected: float64 of the same numbers."""
    near = 1e-5 if got.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(got.double(), expected, rtol=near, atol=near * float(expected.abs().max()) / 8)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 64, 96, 97, 200])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(16, 8), (48, 64), (32, 392), (16, 1536), (64, 72), (144, 64)]
)
def test_it_is_a_linear_layer(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs)
    expected = F.linear(x.double(), weight.double(), bias.double())
    close(linear_cpu.linear(x, linear_cpu.pack(weight), bias), expected)
    wide = linear_cpu.linear(x, linear_cpu.pack(weight), bias, torch.float32)
    torch.testing.assert_close(wide.double(), expected, rtol=1e-5, atol=1e-5 * inputs**0.5)


def test_numbers_too_small_for_a_full_exponent_are_nearly_nothing(dtype: torch.dtype) -> None:
    x, weight = torch.full((3, 8), 1e-39).to(dtype), torch.full((16, 8), 3.0).to(dtype)
    assert linear_cpu.linear(x, linear_cpu.pack(weight), None).abs().max() < 1e-37


def test_rows_of_a_wider_matrix_are_read_where_they_lie(dtype: torch.dtype) -> None:
    wide, weight = torch.randn(9, 101).to(dtype), torch.randn(16, 64).to(dtype)
    panels = linear_cpu.pack(weight)
    for x in (wide[:, 20:84], wide[:, 21:85], wide[:, :64].t().contiguous().t()):
        close(linear_cpu.linear(x, panels, None), x.double() @ weight.double().T)


@pytest.mark.parametrize("bias", [False, True])
def test_it_adds_to_a_residual(bias: bool, dtype: torch.dtype) -> None:
    weight, offset = torch.randn(48, 64).to(dtype), torch.randn(48).to(dtype) if bias else None
    layer, x, residual = Linear(weight, offset), torch.randn(7, 64).to(dtype), torch.randn(7, 48).to(dtype)
    expected = residual.double() + F.linear(
        x.double(), weight.double(), None if offset is None else offset.double()
    )
    layer.add_to(residual, x)
    assert layer.compiled is not None
    close(residual, expected)


@pytest.mark.parametrize("bias", [False, True])
# The third is gated after its layers; the second's panels are no whole register tiles.
@pytest.mark.parametrize("inner", [64, 48, 40])
def test_a_gated_pair_is_silu_of_one_times_the_other(inner: int, bias: bool, dtype: torch.dtype) -> None:
    gate, up = torch.randn(inner, 64).to(dtype), torch.randn(inner, 64).to(dtype)
    biases = (torch.randn(inner).to(dtype), torch.randn(inner).to(dtype)) if bias else (None, None)
    x = torch.randn(70, 64).to(dtype)
    layer = GatedLinear(gate, up, *biases)
    first, second = (
        F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        for weight, offset in zip((gate, up), biases, strict=True)
    )
    assert (Linear.gated(gate, up, None) is None) == (inner == 40)
    got, expected = layer(x), F.silu(first) * second
    if inner == 40 and dtype == torch.bfloat16:
        torch.testing.assert_close(got.double(), expected, rtol=2**-6, atol=2**-6)  # rounded twice
    else:
        close(got, expected)


def test_silu_holds_for_any_gate() -> None:
    gates = torch.tensor([-1e30, -1e4, -100.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 100.0, 1e4, 1e30]).view(-1, 1)
    x = torch.cat([gates, torch.ones(len(gates), 1), torch.zeros(len(gates), 2)], 1)
    gate, up = torch.zeros(16, 4), torch.zeros(16, 4)
    gate[:, 0] = 1
    up[:, 1] = 1
    got = GatedLinear(gate, up)(x)
    torch.testing.assert_close(got[:, 0].double(), F.silu(gates[:, 0].double()), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_beside_any_rows_on_any_number_of_threads(
    threads: int, dtype: torch.dtype
) -> None:
    gate, up, down = (torch.randn(shape).to(dtype) for shape in ((64, 200), (64, 200), (208, 64)))
    gated, linear = GatedLinear(gate, up), Linear(down)
    x = torch.randn(220, 200).to(dtype)
    together = linear(gated(x))
    torch.set_num_threads(threads)
    for begin, end in [(0, 1), (3, 5), (7, 10), (0, 4), (5, 10), (100, 107), (0, 96), (1, 220)]:
        assert torch.equal(linear(gated(x[begin:end])), together[begin:end])


def test_a_broken_row_breaks_itself_alone(dtype: torch.dtype) -> None:
    linear = Linear(torch.randn(32, 64).to(dtype))
    x = torch.randn(9, 64).to(dtype)
    before = linear(x)
    x[4, 3], x[8, 0] = torch.nan, torch.inf
    after = linear(x)
    whole = [0, 1, 2, 3, 5, 6, 7]
    assert torch.equal(after[whole], before[whole])
    assert after[4].isnan().all()
    assert not after[8].isfinite().any()


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize("rows", [1, 5, 6, 64, 96, 97, 500])
@pytest.mark.parametrize("panels", [1, 9, 36, 60, 3072])
def test_a_step_is_cut_into_items_that_keep_every_thread_at_work(
    rows: int, panels: int, threads: int
) -> None:
    chunk = linear_cpu._chunk(rows, panels, threads)
    assert chunk % 6 == 0 and chunk <= 96
    items = -(-rows // chunk) * -(-panels // 4)
    finest = max(rows // 12, 1) * -(-panels // 4)
    if finest >= 20 * threads:
        assert linear_cpu._busy(items, threads) >= 0.9


def test_what_it_cannot_serve_is_named() -> None:
    assert "40 outputs" in str(linear_cpu.refusal(torch.randn(40, 64)))
    assert "6 inputs" in str(linear_cpu.refusal(torch.randn(32, 6)))
    assert "12 inputs" in str(linear_cpu.refusal(torch.randn(32, 12).bfloat16()))
    assert "float32" in str(linear_cpu.refusal(torch.randn(32, 64).half()))


def test_no_rows_are_no_error() -> None:
    assert Linear(torch.randn(16, 8))(torch.randn(0, 8)).shape == (0, 16)
