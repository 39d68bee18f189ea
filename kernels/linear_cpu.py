"""Dense layers in float32 and bfloat16 on CPU: y = x W^T + b, stored, added to a residual, or as a gated pair
of layers.

For the few dozen to few hundred rows of a step a kernel that holds its sums in registers and meets every
weight once beats oneDNN's packed form, and it keeps the promise that a row's bits do not depend on the rows
beside it, which libraries make only by chance.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pagemill.kernels import cpu_threads
from pagemill.kernels import linear_cpu_words as words
from pagemill.kernels.choice import takes_compiled
from pagemill.kernels.cpu_kinds import kind_of
from pagemill.kernels.cpu_program import Phase

# How many inputs a line of a panel holds.
INPUTS_OF_A_LINE = {torch.float32: 1, torch.bfloat16: 2}
# How much of the time that the last thread takes all of them should be at work.
BALANCE = 0.95


def refusal(weight: Tensor) -> str | None:
    """Why this form cannot serve a weight [outputs, inputs]; None if it can."""
    if not takes_compiled(weight) or weight.dtype not in INPUTS_OF_A_LINE:
        return "it computes float32 and bfloat16 on CPU only"
    if weight.shape[0] % words.PANEL:
        return f"{weight.shape[0]} outputs are not a multiple of {words.PANEL}"
    if weight.shape[1] % (multiple := words.UNROLL * INPUTS_OF_A_LINE[weight.dtype]):
        return f"{weight.shape[1]} inputs are not a multiple of {multiple}"
    return cpu_threads.why_not_compiled()


def pack(weight: Tensor) -> Tensor:
    """[outputs, inputs] as panels [outputs / 16, lines, 16, inputs of a line]."""
    outputs, inputs = weight.shape
    together = INPUTS_OF_A_LINE[weight.dtype]
    panels = weight.view(outputs // words.PANEL, words.PANEL, inputs // together, together)
    return panels.transpose(1, 2).contiguous()


def pack_pair(gate: Tensor, up: Tensor) -> Tensor:
    """The panels of two weights of one shape, in turns."""
    return torch.stack([pack(gate), pack(up)], 1).flatten(0, 1)


def linear(x: Tensor, panels: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """x [tokens, inputs] by panels of `pack`; returns [tokens, outputs], in x's dtype or float32."""
    out = torch.empty(x.shape[0], panels.shape[0] * words.PANEL, dtype=dtype or x.dtype)
    _run(x, panels, bias, out, words.STORE)
    return out


def linear_add(x: Tensor, panels: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """Adds the layer's output to `residual` [tokens, outputs] in place."""
    _run(x, panels, bias, residual, words.ADD)


def linear_gated(x: Tensor, panels: Tensor, bias: Tensor | None) -> Tensor:
    """silu(x gate^T) * (x up^T) by panels of `pack_pair`; bias [outputs / 16, 2, 16] likewise."""
    out = torch.empty(x.shape[0], panels.shape[0] // 2 * words.PANEL, dtype=x.dtype)
    _run(x, panels, bias, out, words.GATE)
    return out


def phase(
    x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor, into: int, threads: int, name: str = ""
) -> Phase:
    """The same as a part of a program; x, out: of as many rows as may come, their numbers side by side."""
    rows = x.shape[0]
    block = _words(x, panels, bias, out, into, _chunk(rows, panels.shape[0], threads))
    return Phase(_code(x.dtype, out.dtype), block, Fit(panels.shape[0], threads), name)


@dataclass(frozen=True, slots=True)
class Fit:
    """What of a product's words depends on how many rows there are."""

    panels: int
    threads: int

    def __call__(self, rows: int) -> dict[int, int]:
        chunk = _chunk(rows, self.panels, self.threads)
        return {words.ITEM: 0, words.ROWS: rows, words.CHUNK: chunk, words.CHUNKS: -(-rows // chunk)}


def _run(x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor, into: int) -> None:
    """x, panels: of one dtype; bias: float32."""
    rows = x.shape[0]
    if rows == 0:
        return
    # Of bfloat16 a row begins where a pair may.
    if x.stride(1) != 1 or x.stride(0) * x.element_size() % 4:
        x = x.contiguous()
    threads = torch.get_num_threads()
    block = _words(x, panels, bias, out, into, _chunk(rows, panels.shape[0], threads))
    cpu_threads.run(_code(x.dtype, out.dtype), block, threads)


def _words(x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor, into: int, chunk: int) -> array[int]:
    rows = x.shape[0]
    return cpu_threads.words_of(
        *(0,) * words.ROWS,
        rows,
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        out.data_ptr(),
        out.stride(0) * out.element_size(),
        panels.shape[1],
        panels.shape[0],
        panels.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        into,
        chunk,
        -(-rows // chunk),
        _chain(panels.shape[1]),
    )


@cache
def _chunk(rows: int, panels: int, threads: int) -> int:
    """Rows of an item: whole register tiles, and no more than give every thread as much to do as others."""
    least = -(-rows // words.MOST_ROWS)
    most = max(least, rows // (2 * words.TILE_ROWS))
    groups = -(-panels // words.MOST_PANELS)
    parts = next((n for n in range(least, most + 1) if _busy(groups * n, threads) >= BALANCE), most)
    tiles = -(-rows // (parts * words.TILE_ROWS))
    return tiles * words.TILE_ROWS


def _busy(items: int, threads: int) -> float:
    """The share of their time in which threads have work, if each item takes as long."""
    return items / (-(-items // threads) * threads)


@cache
def _chain(lines: int) -> int:
    """Lines of a chain: chains of like length, so that none is too short for its overhead."""
    fours = lines // words.UNROLL
    return -(-fours // -(-lines // words.DEPTH)) * words.UNROLL


@cache
def _code(dtype: torch.dtype, out: torch.dtype) -> int:
    from pagemill.kernels.cpu_vector import multiplies_bf16
    from pagemill.kernels.linear_cpu_kernel import compile_linear

    return compile_linear(kind_of(dtype, multiplies_bf16()), int(out == torch.bfloat16))
