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
from functools import cache

import torch
from torch import Tensor

from pagemill.kernels import cpu_threads
from pagemill.kernels import linear_int8_cpu_words as words

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
        scratch = _scratch(parameters, 0, threads)
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
        self._run(x, out, words.GATE if self.gated else words.STORE)
        return out if width == self.out_features else out[:, : self.out_features].contiguous()

    def adds(self, residual: Tensor) -> bool:
        """Whether add_to can: outputs come in panels, and nothing may be added behind a row's end."""
        return len(self.scales) == self.out_features and residual.stride(1) == 1

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual [tokens, out] += the layer's output for x; both of one dtype."""
        self._run(x, residual, words.ADD)

    def _run(self, x: Tensor, out: Tensor, into: int) -> None:
        rows, threads = x.shape[0], torch.get_num_threads()
        if rows == 0:
            return
        if x.stride(1) != 1:
            x = x.contiguous()
        block = _Words.from_buffer_copy(self.words)
        scratch = _scratch(block, rows, threads)
        _take_rows(block, x)
        block[words.OUT], block[words.OUT_ROW] = out.data_ptr(), out.stride(0) * out.element_size()
        block[words.INTO] = into
        items = _share_out(block, rows, threads)
        round_rows, multiply = _code(self.kind, x.dtype == torch.bfloat16)
        address = ctypes.addressof(block)
        cpu_threads.run(round_rows, address, min(threads, rows))
        cpu_threads.run(multiply, address, min(threads, items))
        del scratch


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


def _scratch(block: Words, rows: int, threads: int) -> Tensor:
    """Memory for each thread's rotated row, sums and gates, and for all rows' scales and integers."""
    mine = block[words.WIDTH] * 4 + words.LINE
    scales = -(-rows * 4 // words.LINE) * words.LINE
    integers = rows * block[words.VALUES_ROW]
    size = threads * (mine + words.SUMS_BYTES + words.GATES_BYTES) + scales + integers + words.LINE
    memory = torch.empty(size, dtype=torch.uint8)
    start = -(-memory.data_ptr() // words.LINE) * words.LINE
    block[words.SCRATCH], block[words.SCRATCH_BYTES] = start, mine
    block[words.SUMS] = start + threads * mine
    block[words.GATES] = block[words.SUMS] + threads * words.SUMS_BYTES
    block[words.ROW_SCALES] = block[words.GATES] + threads * words.GATES_BYTES
    block[words.VALUES] = block[words.ROW_SCALES] + scales
    return memory


def _share_out(block: Words, rows: int, threads: int) -> int:
    """Cuts the product into items of rows and panels; returns how many there are."""
    # Runs of like size, in whole register tiles.
    tiles = _parts(rows, words.WIDE_TILE_ROWS)
    run = _parts(tiles, _parts(rows, words.ROWS_AN_ITEM)) * words.WIDE_TILE_ROWS
    runs = _parts(rows, run)
    panels = block[words.PANELS]
    together = max(1, min(PANELS_AN_ITEM, runs * panels // (ITEMS_A_THREAD * threads)))
    parts = _parts(panels, together)
    block[words.ITEM_ROWS], block[words.ITEM_PANELS], block[words.PARTS] = run, together, parts
    block[words.ITEMS] = runs * parts
    return runs * parts


def _parts(count: int, size: int) -> int:
    return -(-count // size)


@cache
def _code(kind: str, bf16: bool) -> tuple[int, int]:
    # Here and not above: numba may be missing, and whoever asks nothing of it should not wait for it.
    from pagemill.kernels.linear_int8_cpu_kernel import compile_layer

    return compile_layer(kind, bf16)
