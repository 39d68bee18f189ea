"""Dense layers in 8-bit integers: half the memory of bfloat16, and on most CPUs more speed.

Weights have one scale an output channel, activations one scale a token, taken from that token alone when it
comes: what stands in one row, an outlier or a NaN, changes no other. Both are rotated first, in blocks, by
a Hadamard matrix: it spreads an outlier over its block, and cancels in the product (Ashkboos et al.,
"QuaRot", 2024). Without it a channel that is a hundred times larger than the others leaves these one or two
bits. On SmolLM2-135M the rotation takes the cost of int8 from 5 % of perplexity to a few tenths.

The product is exact integer arithmetic, and everything around it is float32 operations in one order. So all
implementations, of which the fastest here is found by trying, give the same bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pagemill.kernels import linear_int8_cpu
from pagemill.kernels.choice import takes_compiled, takes_triton
from pagemill.kernels.linear_int8_cpu_words import SMALLEST_ROW

logger = logging.getLogger(__name__)

# Products of so many 8-bit numbers add up in 32 bits, one of them as unsigned too.
MOST_INPUTS = 1 << 16
# Numbers that are rotated together at most.
LARGEST_BLOCK = 128
COMPILED_DTYPES = (torch.float32, torch.bfloat16)
# Sums of so many products of int8 are exact in float32.
EXACT_IN_FLOAT = 1024


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """values: int8 [out, in], rotated. scales: float32 [out]. bias: float32 [out], zeros if none."""

    values: Tensor
    scales: Tensor
    bias: Tensor


class Int8Linear:
    """y = x W^T + b for x [tokens, in] in float32 or bfloat16; weight [out, in], bias [out] or None.

    On a GPU x may be float16 too. A row of x that holds a NaN or an infinity gives a row of NaN. route: the
    implementation's name, by default that which was fastest when tried on this machine.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, route: str | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        whole = quantize_weight(weight, bias)
        name = route or _route_of(weight)
        self.multiply = ROUTES[name](whole)

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the layer's output for x to `residual` [tokens, out] in place."""
        layer = self.multiply
        if isinstance(layer, linear_int8_cpu.Layer) and layer.adds(residual) and residual.dtype == x.dtype:
            layer.add_to(residual, x)
        else:
            residual.add_(self(x))

    @staticmethod
    def gated(
        gate: Tensor, up: Tensor, bias: Tensor | None, *, route: str | None = None
    ) -> Callable[[Tensor], Tensor] | None:
        """silu(x gate^T) * (x up^T) in one pass, bias [2 * out] the gate's first; None where that is not
        compiled. route: as above."""
        outputs, inputs = gate.shape
        if not takes_compiled(gate) or inputs % linear_int8_cpu.MULTIPLE or outputs % linear_int8_cpu.PANEL:
            return None
        kind = route or fastest_route()
        if kind not in linear_int8_cpu.kinds():
            return None
        whole = quantize_weight(torch.cat([gate, up]), bias)
        return linear_int8_cpu.Layer(
            kind, whole.values, whole.scales, whole.bias, block_of(inputs), gated=True
        )


def block_of(width: int) -> int:
    """How many neighbouring numbers of a row of `width` are rotated together: a power of two."""
    return min(width & -width, LARGEST_BLOCK)


def rotate(x: Tensor, block: int) -> Tensor:
    """Each block of x [rows, width] times the Hadamard matrix of +1 and -1, in float32.

    As butterflies over ever larger distances; the compiled form does the same additions.
    """
    rows, width = x.shape
    x = x.float()
    distance = 1
    while distance < block:
        pairs = x.reshape(rows, width // (2 * distance), 2, distance)
        first, second = pairs.unbind(2)
        x = torch.stack([first + second, first - second], 2)
        distance *= 2
    return x.reshape(rows, width)


def quantize_weight(weight: Tensor, bias: Tensor | None = None) -> Int8Weight:
    """Raises ValueError for more inputs than 32-bit sums can hold."""
    width = weight.shape[1]
    if width > MOST_INPUTS:
        raise ValueError(f"{width} inputs are more than 32-bit sums of 8-bit products hold ({MOST_INPUTS})")
    block = block_of(width)
    values, scales = _rounded(weight, block)
    # Twice a Hadamard matrix is `block` times the identity; dividing by a power of two loses nothing.
    scales /= block
    return Int8Weight(values, scales, scales.new_zeros(len(weight)) if bias is None else bias.float())


def _rounded(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    if takes_triton(weight):
        from pagemill.kernels import linear_triton

        return linear_triton.round_rows(weight, torch.int8, block)
    # The compiled form gives the same bits and is many times faster: it loads a model in less time.
    if block % linear_int8_cpu.MULTIPLE == 0 and linear_int8_cpu.kinds() and weight.dtype in COMPILED_DTYPES:
        return linear_int8_cpu.round_rows(weight, block)
    return quantize_rows(rotate(weight, block))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values in [-127, 127] and float32 scales of the rows of x: x = values * scale, nearly.

    The scale of a row that is not finite is NaN.
    """
    largest = x.abs().amax(-1)
    finite = largest.isfinite()
    usable = finite & (largest >= SMALLEST_ROW)
    # torch takes a number over a tensor for a product with the reciprocal, which rounds twice.
    inverse = torch.where(usable, torch.full_like(largest, 127) / largest, 0.0)
    values = torch.where(usable[:, None], x * inverse[:, None], 0.0).round_().to(torch.int8)
    scales = torch.where(usable, largest / 127, 0.0)
    return values, torch.where(finite, scales, torch.nan)


def exact_product(left: Tensor, right: Tensor) -> Tensor:
    """int32 [rows, out] of int8 [rows, in] and [out, in], by float32 products short enough to be exact."""
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.int32)
    for start in range(0, left.shape[1], EXACT_IN_FLOAT):
        part = slice(start, start + EXACT_IN_FLOAT)
        total += (left[:, part].float() @ right[:, part].float().T).to(torch.int32)
    return total


Multiply = Callable[[Tensor], Tensor]


def _in_torch(weight: Int8Weight, product: Callable[[Tensor, Tensor], Tensor]) -> Multiply:
    block = block_of(weight.values.shape[1])

    def multiply(x: Tensor) -> Tensor:
        values, scales = quantize_rows(rotate(x, block))
        out = product(values, weight.values).float() * scales[:, None] * weight.scales
        return (out + weight.bias).to(x.dtype)

    return multiply


def _reference(weight: Int8Weight) -> Multiply:
    return _in_torch(weight, exact_product)


def _torch_int_mm(weight: Int8Weight) -> Multiply:
    return _in_torch(weight, lambda values, right: torch._int_mm(values, right.T))


def _compiled(kind: str) -> Callable[[Int8Weight], Multiply]:
    def make(weight: Int8Weight) -> Multiply:
        block = block_of(weight.values.shape[1])
        return linear_int8_cpu.Layer(kind, weight.values, weight.scales, weight.bias, block)

    return make


def _triton(weight: Int8Weight) -> Multiply:
    from pagemill.kernels import linear_triton

    block = block_of(weight.values.shape[1])
    return linear_triton.Layer(weight.values, weight.scales, weight.bias, block)


# How often each route is timed before one is chosen.
ROUNDS = 9

# "words" and "bytes" are compiled (linear_int8_cpu.py), "triton" is for tensors on a GPU
# (linear_triton.py); the others need torch alone and take any shape.
ROUTES: dict[str, Callable[[Int8Weight], Multiply]] = {
    "words": _compiled("words"),
    "bytes": _compiled("bytes"),
    "int_mm": _torch_int_mm,
    "float": _reference,
    "triton": _triton,
}


def _route_of(weight: Tensor) -> str:
    if takes_triton(weight):
        return "triton"
    return fastest_route(weight.shape[1] % linear_int8_cpu.MULTIPLE == 0)


@cache
def fastest_route(compiled: bool = True) -> str:
    """The name of the route that multiplies 64 rows fastest here and gives the right integers.

    compiled: whether compiled routes can serve the layer. Tried once a process, in some hundredths of a
    second and the first time in which code is compiled.
    """
    kinds = linear_int8_cpu.kinds() if compiled else ()
    usable = {name: _usable(name) for name in (*kinds, "int_mm", "float")}
    seconds = dict.fromkeys(usable, float("inf"))
    # By turns, and the best of each: a machine that stands still for a moment must not decide.
    for _ in range(ROUNDS):
        for name, product in usable.items():
            if product is not None:
                seconds[name] = min(seconds[name], _seconds(product))
    logger.info("int8 linear layers: %s", ", ".join(f"{n} {1e3 * s:.2f} ms" for n, s in seconds.items()))
    return min(seconds, key=lambda name: seconds[name])


def _usable(name: str) -> Callable[[], Tensor] | None:
    """A product to be timed; None where it fails or is wrong."""
    generator = torch.Generator().manual_seed(0)
    # The largest numbers on both sides, where an instruction that saturates would show.
    values = torch.randint(0, 2, (512, 512), generator=generator, dtype=torch.int8) * 254 - 127
    values[:256] = torch.randint(-127, 128, (256, 512), generator=generator, dtype=torch.int8)
    weight = Int8Weight(values, torch.rand(512, generator=generator), torch.zeros(512))
    x = rotate(torch.randint(0, 2, (64, 512), generator=generator) * 2.0 - 1.0, block_of(512))
    x[:32] = torch.randn(32, 512, generator=generator)
    try:
        multiply = ROUTES[name](weight)
        right = torch.equal(multiply(x), _reference(weight)(x))
    except RuntimeError as error:
        logger.warning("int8 linear layers cannot take the route %s: %s", name, error)
        return None
    if not right:
        logger.warning("int8 linear layers must not take the route %s: it miscalculates here", name)
        return None
    return lambda: multiply(x)


def _seconds(product: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    product()
    return time.perf_counter() - started
