"""Int8 layers: every implementation gives the same bits, and a row's own alone."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagemill.kernels import linear_int8, linear_int8_cpu
from pagemill.kernels.linear_int8 import Int8Linear, exact_product, quantize_rows, rotate

KINDS = linear_int8_cpu.kinds()
SHAPES = [(96, 64), (960, 576), (40, 1536), (7, 16), (100, 48)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """NaN equals NaN, whatever else its bits say."""
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(), right.nan_to_num())


@pytest.mark.parametrize("route", [*KINDS, "int_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_every_route_gives_the_bits_of_the_reference(
    route: str, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    layer = Int8Linear(weight, bias, route=route)
    reference = Int8Linear(weight, bias, route="float")
    for rows in (1, 2, 3, 5, 6, 7, 13, 40):
        x = torch.randn(rows, inputs).to(dtype)
        assert same_bits(layer(x), reference(x)), rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_with_a_residual_is_that_of_two_steps(kind: str, dtype: torch.dtype) -> None:
    layer = Int8Linear(torch.randn(96, 64), torch.randn(96), route=kind)
    for rows in (0, 1, 7, 100):
        x, residual = torch.randn(rows, 64).to(dtype), torch.randn(rows, 3, 96).to(dtype)[:, 1]
        expected = residual.float() + layer(x.float())
        if dtype is torch.float32:
            layer.add_to(residual, x)
            assert torch.equal(residual, expected)
        else:
            layer.add_to(residual, x)
            torch.testing.assert_close(residual, expected.to(dtype), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_a_gated_pair_is_its_two_layers(kind: str, dtype: torch.dtype, biased: bool) -> None:
    gate, up, bias = torch.randn(48, 64), torch.randn(48, 64), torch.randn(96) if biased else None
    pair = Int8Linear.gated(gate, up, bias, route=kind)
    assert pair is not None
    halves = bias.chunk(2) if biased and bias is not None else (None, None)
    first, second = (Int8Linear(w, b, route="float") for w, b in zip((gate, up), halves, strict=True))
    # Items hold at most 96 rows: both one item and several, and rows beside every size of tile.
    for rows in (0, 1, 2, 4, 6, 13, 96, 97, 201):
        x = torch.randn(rows, 64).to(dtype)
        expected = F.silu(first(x).float()) * second(x.float())
        torch.testing.assert_close(
            pair(x).float(),
            expected,
            rtol=2e-6 if dtype is torch.float32 else 2**-6,
            atol=1e-5 if dtype is torch.float32 else 2**-6,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_gated_pair_gives_a_row_the_same_bits_in_any_company(kind: str) -> None:
    pair = Int8Linear.gated(torch.randn(32, 64), torch.randn(32, 64), None, route=kind)
    assert pair is not None
    x = torch.randn(130, 64)
    x[7] = float("nan")
    together = pair(x)
    assert together[7].isnan().all()
    for row in (0, 8, 95, 96, 129):
        assert torch.equal(pair(x[row : row + 1])[0], together[row])


def test_a_pair_that_does_not_come_in_panels_is_left_to_two_layers() -> None:
    assert Int8Linear.gated(torch.randn(24, 64), torch.randn(24, 64), None) is None
    assert Int8Linear.gated(torch.randn(32, 40), torch.randn(32, 40), None) is None


@pytest.mark.parametrize("kind", KINDS)
def test_long_runs_of_rows_and_strided_ones_are_right(kind: str) -> None:
    weight = torch.randn(48, 64)
    x = torch.randn(301, 3, 64)[:, 1]
    assert torch.equal(Int8Linear(weight, route=kind)(x), Int8Linear(weight, route="float")(x))
    turned = torch.randn(64, 9).T
    assert torch.equal(Int8Linear(weight, route=kind)(turned), Int8Linear(weight, route="float")(turned))


@pytest.mark.parametrize("route", [*KINDS, "int_mm", "float"])
def test_the_largest_integers_do_not_saturate(route: str) -> None:
    # Rows that the rotation turns into 127 everywhere, against weights that it turns into the same.
    inputs = 64
    spread = rotate(torch.eye(inputs)[:1], inputs)
    whole = rotate(torch.ones(1, inputs), inputs)
    weight = torch.cat([whole, -whole, spread])
    x = torch.cat([whole, -whole, spread])
    values, _ = quantize_rows(rotate(x, inputs))
    assert values[0].tolist() == [127] * inputs
    torch.testing.assert_close(Int8Linear(weight, route=route)(x), x @ weight.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("route", [*KINDS, "int_mm", "float"])
def test_a_broken_neighbour_changes_no_other_row(route: str) -> None:
    layer = Int8Linear(torch.randn(48, 64), torch.randn(48), route=route)
    x = torch.randn(9, 64)
    clean = layer(x)
    for number in (1e30, 1e-42, 0.0, float("inf"), float("-inf"), float("nan")):
        dirty = x.clone()
        dirty[4, 7] = number
        result = layer(dirty)
        others = [i for i in range(9) if i != 4]
        assert torch.equal(result[others], clean[others]), number
        if not dirty[4].isfinite().all():
            assert result[4].isnan().all(), number


def test_numbers_that_overflow_when_rotated_break_their_row_alone() -> None:
    x = torch.randn(3, 64)
    x[1] = 3e38
    result = Int8Linear(torch.randn(16, 64))(x)
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


@pytest.mark.parametrize("route", [*KINDS, "float"])
def test_rows_of_zeros_and_weights_of_zeros(route: str) -> None:
    weight, bias = torch.randn(16, 64), torch.randn(16)
    weight[3] = 0
    x = torch.randn(3, 64)
    x[1], x[2] = 0, 1e-35
    result = Int8Linear(weight, bias, route=route)(x)
    assert torch.equal(result[1], bias)
    assert torch.equal(result[2], bias)
    assert torch.equal(result[:, 3], bias[3].expand(3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=30)
@given(data=st.data())
def test_a_row_has_the_same_bits_beside_any_others_and_on_any_threads(
    kind: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    outputs = data.draw(st.integers(1, 70))
    inputs = 16 * data.draw(st.integers(1, 12))
    layer = Int8Linear(torch.randn(outputs, inputs), torch.randn(outputs), route=kind)
    x = torch.randn(data.draw(st.integers(1, 250)), inputs).to(dtype)
    together = layer(x)
    first = data.draw(st.integers(0, len(x) - 1))
    last = data.draw(st.integers(first + 1, len(x)))
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    assert torch.equal(layer(x[first:last].clone()), together[first:last])
    torch.set_num_threads(1)


def test_it_is_a_linear_layer_up_to_what_eight_bits_hold() -> None:
    weight, bias, x = torch.randn(200, 576), torch.randn(200), torch.randn(30, 576)
    error = Int8Linear(weight, bias)(x) - F.linear(x, weight, bias)
    # Rounding both sides to 1/127 of about three and a half deviations.
    assert error.std() / 576**0.5 < 0.015


def test_an_outlier_channel_leaves_the_others_their_bits() -> None:
    weight, x = torch.randn(200, 576), torch.randn(30, 576)
    x[:, 100] *= 60
    exact = F.linear(x, weight)
    values, scales = quantize_rows(x)
    plain = F.linear(values.float() * scales[:, None], weight)
    rotated = Int8Linear(weight)(x)
    assert (rotated - exact).std() < (plain - exact).std() / 3


def test_no_rows_are_no_error() -> None:
    assert Int8Linear(torch.randn(7, 16))(torch.randn(0, 16)).shape == (0, 7)


def test_widths_that_no_vector_fits_take_torch() -> None:
    weight, x = torch.randn(8, 30), torch.randn(4, 30)
    torch.testing.assert_close(Int8Linear(weight)(x), F.linear(x, weight), rtol=0.1, atol=0.3)
    if KINDS:
        with pytest.raises(ValueError, match="16 numbers or more"):
            Int8Linear(weight, route="words")


def test_more_inputs_than_sums_can_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="65536"):
        Int8Linear(torch.zeros(1, 65552))


@pytest.mark.skipif(not KINDS, reason="nothing is compiled here")
def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        Int8Linear(torch.randn(16, 16), route="words")(torch.randn(2, 16, dtype=torch.float64))


@pytest.mark.skipif(not KINDS, reason="nothing is compiled here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_rounded_alike_by_both_forms(dtype: torch.dtype) -> None:
    for outputs, inputs in [*SHAPES, (linear_int8_cpu.ROWS_AT_ONCE + 5, 16)]:
        block = linear_int8.block_of(inputs)
        weight = torch.randn(outputs, inputs).to(dtype)
        for mine, theirs in zip(
            linear_int8_cpu.round_rows(weight, block), quantize_rows(rotate(weight, block)), strict=True
        ):
            assert torch.equal(mine, theirs)


def test_the_rotation_keeps_products() -> None:
    x, y = torch.randn(5, 96, dtype=torch.float64).float(), torch.randn(5, 96)
    block = linear_int8.block_of(96)
    assert block == 32
    torch.testing.assert_close((rotate(x, block) * rotate(y, block)).sum(1) / block, (x * y).sum(1))


def test_the_exact_product_is_exact() -> None:
    left = torch.full((2, 3000), 127, dtype=torch.int8)
    right = torch.full((3, 3000), -127, dtype=torch.int8)
    right[1] = 127
    right[2, ::2] = 126
    assert exact_product(left, right).tolist() == (left.long() @ right.long().T).tolist()


def test_a_route_that_miscalculates_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(weight: linear_int8.Int8Weight) -> linear_int8.Multiply:
        right = linear_int8.ROUTES["float"](weight)
        return lambda x: torch.nextafter(right(x), torch.tensor(torch.inf))

    def failing(weight: linear_int8.Int8Weight) -> linear_int8.Multiply:
        raise RuntimeError("could not create a primitive")

    monkeypatch.setitem(linear_int8.ROUTES, "int_mm", wrong)
    assert linear_int8._usable("int_mm") is None
    monkeypatch.setitem(linear_int8.ROUTES, "int_mm", failing)
    assert linear_int8._usable("int_mm") is None
    assert linear_int8._usable("float") is not None


VNNI = """
import re
from pagemill.kernels import cpu_compile, linear_int8_cpu_kernel as kernel

kernel._has = lambda feature: True
# What is compiled for another CPU is not to be kept.
def no_cache(*args):
    raise OSError
cpu_compile._KernelCache = no_cache
kernel.compile_layer("bytes", False)
text = cpu_compile._alive[-1]._library.get_asm_str()
print(len(re.findall(r"vpdpbusd.*zmm", text)), len(re.findall(r"\\bv?p?maddubsw", text)))
"""


@pytest.mark.skipif(not KINDS, reason="numba does not load")
def test_the_form_for_vnni_compiles_to_its_instruction() -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("x86 only")
    features = [
        "avx2",
        "fma",
        "f16c",
        "bmi",
        "bmi2",
        "popcnt",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512vnni",
    ]
    environment = os.environ | {
        "NUMBA_CPU_NAME": "icelake-server",
        "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in features),
    }
    done = subprocess.run(
        [sys.executable, "-c", VNNI], env=environment, capture_output=True, text=True, check=True
    )
    products, saturating = map(int, done.stdout.split())
    assert products >= 2 * (12 + 6 + 4 + 2 + 1)
    assert saturating == 0


def test_a_machine_that_stands_still_for_a_moment_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each route is timed by turns, so that a pause hits all of them and the best of each counts."""
    order: list[str] = []
    monkeypatch.setattr(linear_int8, "_usable", lambda name: lambda: order.append(name))
    monkeypatch.setattr(linear_int8.linear_int8_cpu, "kinds", lambda: ("words",))
    times = {"words": [9.0] * 5 + [0.1] * 4, "int_mm": [9.0] * 5 + [0.4] * 4, "float": [0.8] * 9}

    def seconds(product: Callable[[], object]) -> float:
        product()
        return times[order[-1]].pop(0)

    monkeypatch.setattr(linear_int8, "_seconds", seconds)
    linear_int8.fastest_route.cache_clear()
    try:
        assert linear_int8.fastest_route() == "words"
    finally:
        linear_int8.fastest_route.cache_clear()
    assert order == ["words", "int_mm", "float"] * linear_int8.ROUNDS
