"""Dense layers in float32 on CPU: y = x W^T + b, stored, added to a residual, or as a gated pair.

For the few dozen to few hundred rows of a step a kernel that holds its sums in registers and meets every
weight once beats oneDNN's packed form, and it keeps the promise that a row's bits do not depend on the rows
beside it, which libraries make only by chance.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from pagemill.kernels import cpu_threads
from pagemill.kernels import linear_cpu_words as words
from pagemill.kernels.choice import takes_compiled

# Items a thread should find at least, so that none waits long for another's last one.
ITEMS_A_THREAD = 4


def refusal(weight: Tensor) -> str | None:
    """Why this form cannot serve a weight [outputs, inputs]; None if it can."""
    if not takes_compiled(weight) or weight.dtype != torch.float32:
        return "it computes float32 on CPU only"
    if weight.shape[0] % words.PANEL:
        return f"{weight.shape[0]} outputs are not a multiple of {words.PANEL}"
    if weight.shape[1] % words.UNROLL:
        return f"{weight.shape[1]} inputs are not a multiple of {words.UNROLL}"
    return cpu_threads.why_not_compiled()


def pack(weight: Tensor) -> Tensor:
    """[outputs, inputs] as panels [outputs / 16, inputs, 16]."""
    outputs, inputs = weight.shape
    return weight.view(outputs // words.PANEL, words.PANEL, inputs).transpose(1, 2).contiguous()


def pack_pair(gate: Tensor, up: Tensor) -> Tensor:
    """The panels of two weights of one shape, in turns."""
    return torch.stack([pack(gate), pack(up)], 1).flatten(0, 1)


def linear(x: Tensor, panels: Tensor, bias: Tensor | None) -> Tensor:
    """x [tokens, inputs] by panels of `pack`; returns [tokens, outputs]."""
    out = torch.empty(x.shape[0], panels.shape[0] * words.PANEL)
    _run(x, panels, bias, out, words.STORE)
    return out


def linear_add(x: Tensor, panels: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """Adds the layer's output to `residual` [tokens, outputs] in place."""
    _run(x, panels, bias, residual, words.ADD)


def linear_gated(x: Tensor, panels: Tensor, bias: Tensor | None) -> Tensor:
    """silu(x gate^T) * (x up^T) by panels of `pack_pair`; bias [outputs / 16, 2, 16] likewise."""
    out = torch.empty(x.shape[0], panels.shape[0] // 2 * words.PANEL)
    _run(x, panels, bias, out, words.GATE)
    return out


def _run(x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor, into: int) -> None:
    rows = x.shape[0]
    if rows == 0:
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    threads = torch.get_num_threads()
    chunk = _chunk(rows, panels.shape[0], threads)
    block = cpu_threads.words_of(
        *(0,) * words.ROWS,
        rows,
        x.data_ptr(),
        x.stride(0) * 4,
        out.data_ptr(),
        out.stride(0) * 4,
        panels.shape[1],
        panels.shape[0],
        panels.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        into,
        chunk,
        -(-rows // chunk),
        _chain(panels.shape[1]),
    )
    cpu_threads.run(_code(), block, threads)


@cache
def _chunk(rows: int, panels: int, threads: int) -> int:
    """Rows of an item: as many as a thread holds, fewer where that leaves threads without work."""
    parts = max(-(-rows // words.MOST_ROWS), min(-(-ITEMS_A_THREAD * threads // panels), -(-rows // 12)))
    return -(-rows // parts)


@cache
def _chain(inputs: int) -> int:
    """Inputs of a chain: chains of like length, so that none is too short for its overhead."""
    fours = inputs // words.UNROLL
    return -(-fours // -(-inputs // words.DEPTH)) * words.UNROLL


@cache
def _code() -> int:
    from pagemill.kernels.linear_cpu_kernel import compile_linear

    return compile_linear()
