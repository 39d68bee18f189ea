"""Calls the compiled form of int8 linear layers: activations to integers, product, back to numbers.

Two passes of all threads. In the first they take rows, rotate them and round them to integers; in the second
they take panels of 16 outputs and multiply them with a run of rows. The compiled part is
linear_int8_cpu_kernel.py. Integers add up to the same in any order, so nothing here is left to chance.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import sys
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pagemill.kernels import cpu_threads
from pagemill.kernels import linear_int8_cpu_words as words
from pagemill.kernels.cpu_program import Phase
from pagemill.kernels.linear_cpu_words import ADD, GATE, STORE

logger = logging.getLogger(__name__)

Words = ctypes.Array[ctypes.c_int64]
_Words = ctypes.c_int64 * words.WORDS

# The width of a layer must be a multiple of this: rows are handled in vectors of 16.
MULTIPLE = 16
PANEL = words.PANEL
# Rows of a weight that are rounded in one go, to bound what memory that takes.
ROWS_AT_ONCE = 4096
# Panels a thread should find at least, and takes at once at most.
ITEMS_A_THREAD, PANELS_AN_ITEM = 8, 8


@cache
def kinds() -> tuple[str, ...]:
    """Which compiled kinds this machine can run, () if none.

    The first call imports numba, which takes half a second.
    """
    if sys.byteorder != "little" or sys.maxsize < 1 << 32:
        return ()
    try:
        kernel = importlib.import_module("pagemill.kernels.linear_int8_cpu_kernel")
    except ImportError as error:
        logger.warning("int8 linear layers take a slow form in torch, since numba does not load (%s).", error)
        return ()
    return ("words", "bytes") if kernel.multiplies_bytes() else ("words",)


def round_rows(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The rows of x, rotated in blocks, as int8 values and float32 scales; any CPU can that has a kind."""
    threads = torch.get_num_threads()
    values = torch.empty(x.shape, dtype=torch.int8)
    scales = torch.empty(x.shape[0])
    for start in range(0, x.shape[0], ROWS_AT_ONCE):
        part = x[start : start + ROWS_AT_ONCE].contiguous()
        integers = torch.empty(part.shape, dtype=torch.int16)
        parameters = _Words()
        parameters[words.WIDTH], parameters[words.BLOCK] = x.shape[1], block
        parameters[words.VALUES_ROW] = x.shape[1] * words.BYTES["words"]
        mine = x.shape[1] * 4 + words.LINE
        scratch = torch.empty(threads * mine + words.LINE, dtype=torch.uint8)
        _place_scratch(parameters, -(-scratch.data_ptr() // words.LINE) * words.LINE, mine, 0, threads)
        _take_rows(parameters, part)
        parameters[words.VALUES] = integers.data_ptr()
        parameters[words.ROW_SCALES] = scales[start:].data_ptr()
        code, _ = _code("words", x.dtype == torch.bfloat16)
        cpu_threads.run(code, ctypes.addressof(parameters), threads)
        del scratch
        values[start : start + ROWS_AT_ONCE] = integers
    return values, scales


class Layer:
    """One layer's weight as its kind of kernel wants it.

    kind: "words" multiplies 16-bit integers in pairs, which any CPU can, and holds weights in 8 bits all the
    same. "bytes" is for CPUs that multiply 8-bit integers in fours without saturating (VNNI).
    values: int8 [out, in]; scales, bias: float32 [out]; block: numbers that are rotated together.
    gated: the weight is a gate's [out / 2, in] above the other half's, out / 2 a multiple of 16, and the
    layer gives silu(first half) * second half.
    """

    def __init__(
        self, kind: str, values: Tensor, scales: Tensor, bias: Tensor, block: int, *, gated: bool = False
    ) -> None:
        if block % MULTIPLE:
            raise ValueError(f"compiled int8 layers rotate {MULTIPLE} numbers or more, not {block}")
        self.kind, self.gated = kind, gated
        if gated:
            values, scales, bias = (_in_turns(whole) for whole in (values, scales, bias))
        self.out_features = values.shape[0] // (1 + gated)
        padding = -self.out_features % words.PANEL
        values = torch.nn.functional.pad(values, (0, 0, 0, padding))
        self.panels = _panels(values, words.TOGETHER[kind])
        self.scales = torch.nn.functional.pad(scales, (0, padding))
        self.bias = torch.nn.functional.pad(bias, (0, padding))
        # Bytes are multiplied as unsigned, 128 too high; this takes it off again.
        self.offsets = values.sum(1, dtype=torch.int32) * -128
        self.words = self._words(values.shape[0], values.shape[1], block)

    def _words(self, outputs: int, inputs: int, block: int) -> Words:
        """The part of the parameter block that does not change from call to call."""
        fixed = _Words()
        fixed[words.WIDTH], fixed[words.BLOCK] = inputs, block
        fixed[words.PANELS] = outputs // words.PANEL // (1 + self.gated)
        fixed[words.PANEL_LIST] = self.panels.data_ptr()
        fixed[words.SCALES], fixed[words.OFFSETS] = self.scales.data_ptr(), self.offsets.data_ptr()
        fixed[words.BIAS] = self.bias.data_ptr()
        fixed[words.VALUES_ROW] = inputs * words.BYTES[self.kind]
        return fixed

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, in] -> [tokens, out_features] in x's dtype."""
        width = len(self.scales) // (1 + self.gated)
        out = torch.empty(x.shape[0], width, dtype=x.dtype)
        self._run(x, out, GATE if self.gated else STORE)
        return out if width == self.out_features else out[:, : self.out_features].contiguous()

    @property
    def whole_panels(self) -> bool:
        """Whether nothing is computed behind a row's end: outputs come in panels."""
        return len(self.scales) == self.out_features * (1 + self.gated)

    def adds(self, residual: Tensor) -> bool:
        """Whether add_to can: nothing may be added behind a row's end."""
        return self.whole_panels and residual.stride(1) == 1

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual [tokens, out] += the layer's output for x; both of one dtype."""
        self._run(x, residual, ADD)

    def phases(self, x: Tensor, out: Tensor, into: int, memory: Tensor, threads: int) -> list[Phase]:
        """The same as parts of a program: two, over one list of words.

        x, out: of as many rows as may come, their numbers side by side. memory: scratch_bytes for them.
        """
        block = self._block(x, out, into, memory, threads)
        round_rows, multiply = _code(self.kind, x.dtype == torch.bfloat16)
        fit = Fit(block[words.PANELS], threads)
        return [Phase(round_rows, list(block), fit), Phase(multiply, None, fit)]

    def scratch_bytes(self, rows: int, threads: int) -> int:
        """Memory for each thread's rotated row, sums and gates, and for all rows' scales and integers."""
        integers = rows * self.words[words.VALUES_ROW]
        return (
            threads * (self._mine() + words.SUMS_BYTES + words.GATES_BYTES)
            + _scales_bytes(rows)
            + (integers + words.LINE)
        )

    def _mine(self) -> int:
        return int(self.words[words.WIDTH]) * 4 + words.LINE

    def _run(self, x: Tensor, out: Tensor, into: int) -> None:
        rows, threads = x.shape[0], torch.get_num_threads()
        if rows == 0:
            return
        if x.stride(1) != 1:
            x = x.contiguous()
        memory = torch.empty(self.scratch_bytes(rows, threads), dtype=torch.uint8)
        block = self._block(x, out, into, memory, threads)
        round_rows, multiply = _code(self.kind, x.dtype == torch.bfloat16)
        address = ctypes.addressof(block)
        cpu_threads.run(round_rows, address, min(threads, rows))
        cpu_threads.run(multiply, address, min(threads, block[words.ITEMS]))

    def _block(self, x: Tensor, out: Tensor, into: int, memory: Tensor, threads: int) -> Words:
        rows = x.shape[0]
        block = _Words.from_buffer_copy(self.words)
        _take_rows(block, x)
        start = -(-memory.data_ptr() // words.LINE) * words.LINE
        _place_scratch(block, start, self._mine(), rows, threads)
        block[words.OUT], block[words.OUT_ROW] = out.data_ptr(), out.stride(0) * out.element_size()
        block[words.INTO] = into
        for place, value in _share_out(rows, block[words.PANELS], threads).items():
            block[place] = value
        return block


@dataclass(frozen=True, slots=True)
class Fit:
    """What of a layer's words depends on how many rows there are."""

    panels: int
    threads: int

    def __call__(self, rows: int) -> dict[int, int]:
        counters = dict.fromkeys((words.ROW, words.THREAD, words.ITEM, words.THREAD_2), 0)
        return counters | {words.ROWS: rows} | _share_out(rows, self.panels, self.threads)


def _in_turns(whole: Tensor) -> Tensor:
    """The panels of two halves [out / 2, ...], one of the first and one of the second in turns."""
    halves = [half.reshape(-1, words.PANEL, *whole.shape[1:]) for half in whole.chunk(2)]
    return torch.stack(halves, 1).flatten(0, 2)


def _panels(values: Tensor, together: int) -> Tensor:
    """[out / 16, in / together, 16, together]: what a step of the kernel multiplies lies together."""
    outputs, inputs = values.shape
    split = values.view(outputs // words.PANEL, words.PANEL, inputs // together, together)
    return split.transpose(1, 2).contiguous()


def _take_rows(block: Words, x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"int8 layers take float32 and bfloat16, not {x.dtype}")
    block[words.ROWS] = x.shape[0]
    block[words.X], block[words.X_ROW] = x.data_ptr(), x.stride(0) * x.element_size()


def _scales_bytes(rows: int) -> int:
    return -(-rows * 4 // words.LINE) * words.LINE


def _place_scratch(block: Words, start: int, mine: int, rows: int, threads: int) -> None:
    block[words.SCRATCH], block[words.SCRATCH_BYTES] = start, mine
    block[words.SUMS] = start + threads * mine
    block[words.GATES] = block[words.SUMS] + threads * words.SUMS_BYTES
    block[words.ROW_SCALES] = block[words.GATES] + threads * words.GATES_BYTES
    block[words.VALUES] = block[words.ROW_SCALES] + _scales_bytes(rows)


@cache
def _share_out(rows: int, panels: int, threads: int) -> dict[int, int]:
    """Cuts the product into items of rows and panels."""
    # Runs of like size, in whole register tiles.
    tiles = _parts(rows, words.WIDE_TILE_ROWS)
    run = _parts(tiles, _parts(rows, words.ROWS_AN_ITEM)) * words.WIDE_TILE_ROWS
    runs = _parts(rows, run)
    together = max(1, min(PANELS_AN_ITEM, runs * panels // (ITEMS_A_THREAD * threads)))
    parts = _parts(panels, together)
    return {
        words.ITEM_ROWS: run,
        words.ITEM_PANELS: together,
        words.PARTS: parts,
        words.ITEMS: runs * parts,
    }


def _parts(count: int, size: int) -> int:
    return -(-count // size)


@cache
def _code(kind: str, bf16: bool) -> tuple[int, int]:
    # Here and not above: numba may be missing, and whoever asks nothing of it should not wait for it.
    from pagemill.kernels.linear_int8_cpu_kernel import compile_layer

    return compile_layer(kind, bf16)
