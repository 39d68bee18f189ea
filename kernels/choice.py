"""Which form of an operation serves a tensor: that in Triton on a CUDA device, those for CPU anywhere else.

One switch makes tensors of the CPU take the forms in Triton too, which the interpreter then runs: so that a
whole step can be tried where there is no card. It is for tests and rehearsals, since interpreted kernels are
thousands of times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_everywhere = False


def takes_triton(x: Tensor) -> bool:
    return x.is_cuda or _everywhere


def takes_compiled(x: Tensor) -> bool:
    """Whether forms compiled for CPU, where there are any, serve it."""
    return x.device.type == "cpu" and not _everywhere


@contextmanager
def triton_everywhere() -> Iterator[None]:
    """Inside, whatever device a tensor is on, forms in Triton serve it, in every thread of the process.
    Layers that lay out weights when they are made must be made inside as well."""
    global _everywhere
    before, _everywhere = _everywhere, True
    try:
        yield
    finally:
        _everywhere = before
