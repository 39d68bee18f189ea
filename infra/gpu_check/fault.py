"""What must not pass for right: memory that nobody wrote, and kernels that are broken on purpose.

`poisoned` makes fresh memory hold NaN or the largest integer, so that a result left over from an earlier call
cannot stand in for one that was not written. `broken` does to a kernel what the command's --break asks for,
which is how the tests see that a wrong kernel is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = ("wrong", "unwritten")


@dataclass(frozen=True, slots=True)
class Fault:
    """name: part of the name of the checks that are broken. kind: `wrong` puts one number of the result off,
    `unwritten` launches nothing."""

    name: str
    kind: str

    @classmethod
    def parse(cls, text: str) -> Fault:
        name, _, kind = text.rpartition(":")
        if kind not in KINDS or not name:
            raise ValueError(f"a fault is NAME:{' or NAME:'.join(KINDS)}, not {text!r}")
        return cls(name, kind)


def spoil(memory: Tensor) -> Tensor:
    """Fills it with NaN, or the largest integer."""
    if memory.dtype == torch.bool:
        return memory.fill_(True)
    if memory.element_size() == 1:
        # NaN of e4m3, and 127: not every device fills tensors of 8-bit floats.
        memory.view(torch.uint8).fill_(0x7F)
        return memory
    return memory.fill_(torch.nan if memory.is_floating_point() else torch.iinfo(memory.dtype).max)


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated in here is spoiled."""
    names = ("empty", "empty_like", "empty_strided")
    before = {name: getattr(torch, name) for name in names}

    def spoiling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *size, **options: spoil(make(*size, **options))

    for name, make in before.items():
        setattr(torch, name, spoiling(make))
    try:
        yield
    finally:
        for name, make in before.items():
            setattr(torch, name, make)


@contextmanager
def nothing_launched() -> Iterator[None]:
    """Every Triton kernel is one that does nothing."""
    from triton.runtime import JITFunction
    from triton.runtime.interpreter import InterpretedFunction

    def idle(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **options: None

    kinds = [kind for kind in (JITFunction, InterpretedFunction) if hasattr(kind, "__getitem__")]
    own = {kind: vars(kind).get("__getitem__") for kind in kinds}
    for kind in kinds:
        kind.__getitem__ = idle
    try:
        yield
    finally:
        for kind, method in own.items():
            if method is None:
                del kind.__getitem__
            else:
                kind.__getitem__ = method


@contextmanager
def broken(fault: Fault | None, name: str) -> Iterator[Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    """Gives what is to be done to the results of the check `name`: nothing, unless the fault means it."""
    kind = fault.kind if fault is not None and fault.name in name else None
    if kind == "unwritten":
        with nothing_launched():
            yield lambda found: found
    else:
        yield _off_by_one if kind == "wrong" else lambda found: found


def _off_by_one(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    first = found[0].contiguous().clone()
    if first.numel():
        middle = first.view(-1)[first.numel() // 2 :][:1]
        middle.copy_((middle.float() + 1).to(first.dtype))
    return (first, *found[1:])
