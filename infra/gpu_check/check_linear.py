"""Dense layers in 8 bits: rounding to the bit, integer products to the bit, both near the whole product."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gpu_check.case import Case, Results, Trial
from gpu_check.compare import EXACT, Tolerance
from gpu_check.setting import DTYPE_NAMES, Setting
from pagemill.kernels import linear_triton
from pagemill.kernels.eight_bits import round_rows
from pagemill.kernels.linear_fp8 import FP8
from pagemill.kernels.linear_int8 import Int8Linear, block_of, quantize_rows, rotate

CPU = torch.device("cpu")


def cases(setting: Setting) -> Iterator[Case]:
    widths = (96,) if setting.dry else (7, 96, 576, 4096, 14336)
    for dtype in setting.all_dtypes:
        for width in widths:
            yield _rotated(dtype, width)
            yield _rounded(dtype, width)
    shapes = ((7, 32),) if setting.dry else ((96, 64), (33, 257), (512, 4096), (1024, 1024))
    for dtype in setting.dtypes:
        for outputs, inputs in shapes:
            for rows in (3,) if setting.dry else (1, 17, 70, 300):
                yield _int8(dtype, outputs, inputs, rows)
                yield _fp8(dtype, outputs, inputs, rows)


def _numbers(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random, device=random.device)


def _odd_rows(random: torch.Generator, width: int, dtype: torch.dtype) -> Tensor:
    """With gaps between them; one of zeros, one with a NaN, one with an infinity, one with an outlier."""
    x = _numbers(random, 9, 2, width)[:, 1]
    x[1], x[2, -1], x[3, 0], x[4, width // 2] = 0, torch.nan, torch.inf, 1000
    return x.to(dtype)


def _rotated(dtype: torch.dtype, width: int) -> Case:
    def make(random: torch.Generator) -> Trial:
        x = _odd_rows(random, width, dtype)
        block = block_of(width)
        return Trial(
            lambda: linear_triton.round_rows(x, torch.int8, block),
            lambda: quantize_rows(rotate(x.to(CPU), block)),
            [EXACT, EXACT],
        )

    return Case(f"rows rotated and rounded to int8: {width} {DTYPE_NAMES[dtype]}", make)


def _rounded(dtype: torch.dtype, width: int) -> Case:
    def make(random: torch.Generator) -> Trial:
        x = _odd_rows(random, width, dtype)

        def wide(values: Tensor, scales: Tensor) -> Results:
            # As numbers: a small one that is rounded away leaves a zero of either sign.
            return values.float(), scales

        return Trial(
            lambda: wide(*linear_triton.round_rows(x, FP8, 1)),
            lambda: wide(*round_rows(x.to(CPU), FP8)),
            [EXACT, EXACT],
        )

    return Case(f"rows rounded to e4m3: {width} {DTYPE_NAMES[dtype]}", make)


def _int8(dtype: torch.dtype, outputs: int, inputs: int, rows: int) -> Case:
    def make(random: torch.Generator) -> Trial:
        weight, bias = _numbers(random, outputs, inputs), _numbers(random, outputs)
        x = _numbers(random, rows, inputs).to(dtype)
        layer = Int8Linear(weight, bias, route="triton")
        run = lambda: (layer(x),) * 2  # noqa: E731

        def expected() -> Results:
            # The same integers in float32 products short enough to be exact; and what was to be computed.
            theirs = Int8Linear(weight.to(CPU), bias.to(CPU), route="float")(x.to(CPU))
            return theirs, x.double() @ weight.double().T + bias.double()

        largest = 6 * inputs**0.5
        return Trial(run, expected, [EXACT, Tolerance(0.0, largest, 0.03)])

    return Case(f"int8 layer: {inputs} to {outputs}, {rows} rows, {DTYPE_NAMES[dtype]}", make)


def _fp8(dtype: torch.dtype, outputs: int, inputs: int, rows: int) -> Case:
    def make(random: torch.Generator) -> Trial:
        weight, bias = _numbers(random, outputs, inputs), _numbers(random, outputs)
        x = _numbers(random, rows, inputs).to(dtype)
        values, scales = (part.to(random.device) for part in round_rows(weight.to(CPU), FP8))
        layer = linear_triton.Layer(values, scales, bias, 1)
        run = lambda: (layer(x),) * 2  # noqa: E731

        def expected() -> Results:
            mine, factors = round_rows(x.to(CPU), FP8)
            product = mine.double() @ values.to(CPU).double().T
            rounded = product * factors.double()[:, None] * scales.to(CPU).double() + bias.to(CPU).double()
            return rounded, x.double() @ weight.double().T + bias.double()

        # Hopper adds up the products of a tile with 14 bits.
        largest = 6 * inputs**0.5
        return Trial(
            run, expected, [Tolerance(2e-2, 4e-3 * inputs**0.5, 6e-3), Tolerance(0.0, largest, 0.06)]
        )

    return Case(f"e4m3 layer: {inputs} to {outputs}, {rows} rows, {DTYPE_NAMES[dtype]}", make)
