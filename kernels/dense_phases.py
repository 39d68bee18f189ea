"""Dense layers of every compiled kind as parts of a program (cpu_program.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagemill.kernels import linear_cpu, linear_int8_cpu
from pagemill.kernels.cpu_program import Phase
from pagemill.kernels.linear import Dense, GatedLinear, GatedPanels, InvariantLinear, Linear
from pagemill.kernels.linear_int8 import Int8Linear

# A layer whose parameters can be written down once.
Compiled = InvariantLinear | GatedPanels | linear_int8_cpu.Layer


def compiled(layer: Dense | GatedLinear, dtype: torch.dtype) -> Compiled | None:
    """What of a layer computes inputs of this dtype here; None where parts of it are not compiled."""
    found: Dense | Callable[[Tensor], Tensor] = layer.whole if isinstance(layer, GatedLinear) else layer
    if isinstance(found, Linear):
        found = found.compiled or found
    if isinstance(found, Int8Linear):
        found = found.multiply
    if isinstance(found, InvariantLinear) and found.plain and found.panels.dtype == dtype:
        return found
    if isinstance(found, GatedPanels) and found.panels.dtype == dtype:
        return found
    if isinstance(found, linear_int8_cpu.Layer) and found.whole_panels:
        return found
    return None


def scratch_of(layers: list[Compiled], rows: int, threads: int) -> Tensor:
    """Memory that all of them may use, one after another."""
    sizes = [
        layer.scratch_bytes(rows, threads) for layer in layers if isinstance(layer, linear_int8_cpu.Layer)
    ]
    return torch.empty(max(sizes, default=0), dtype=torch.uint8)


def phases(layer: Compiled, x: Tensor, out: Tensor, into: int, scratch: Tensor, threads: int) -> list[Phase]:
    """x, out: of as many rows as may come, a row's numbers side by side."""
    if isinstance(layer, linear_int8_cpu.Layer):
        return layer.phases(x, out, into, scratch, threads)
    return [linear_cpu.phase(x, layer.panels, layer.bias, out, into, threads)]
