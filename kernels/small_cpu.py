"""Small operations between the dense layers on CPU, in float32 and bfloat16: one call each where torch makes
four to ten.

Thirty layers of ten-microsecond calls are milliseconds a step. Called by norm.py and rope_write.py, which
hold the same in torch.
"""

from __future__ import annotations

from array import array
from functools import cache

import torch
from torch import Tensor

from pagemill.kernels import cpu_threads
from pagemill.kernels import small_cpu_words as words
from pagemill.kernels.cache_write import BLOCK_SIZE
from pagemill.kernels.cpu_program import Phase
from pagemill.kernels.cpu_threads import why_not_compiled

_DTYPES = (torch.float32, torch.bfloat16)


def serves(x: Tensor) -> bool:
    """Whether x [tokens, ...] is for the functions here."""
    return (
        x.device.type == "cpu"
        and x.dtype in _DTYPES
        and x.shape[-1] % 16 == 0
        and x.stride(-1) == 1
        and why_not_compiled() is None
    )


def turns(x: Tensor, cos: Tensor) -> bool:
    """Whether rope_write can rotate x [tokens, heads, head_dim] by cos: all of a head."""
    return serves(x) and 2 * cos.shape[-1] == x.shape[-1]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [tokens, width]; a weight in bfloat16 multiplies what was rounded to it, as in norm.py."""
    out = torch.empty(x.shape, dtype=x.dtype)
    if x.shape[0]:
        block = _norm_words(x, weight, eps, out)
        cpu_threads.run(_norm(x.dtype, weight.dtype), block, _threads(x.shape[0] // words.ROWS_A_TIME))
    return out


def norm_phase(x: Tensor, weight: Tensor, eps: float, out: Tensor, name: str = "") -> Phase:
    """The same as a part of a program; x, out [rows, width]: of as many rows as may come."""
    return Phase(_norm(x.dtype, weight.dtype), _norm_words(x, weight, eps, out), _fit_norm, name)


def _fit_norm(rows: int) -> dict[int, int]:
    return {words.ITEM: 0, words.ROWS: rows}


def _norm_words(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> array[int]:
    return cpu_threads.words_of(
        *(0,) * words.ROWS,
        x.shape[0],
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        out.data_ptr(),
        x.shape[1],
        weight.data_ptr(),
        cpu_threads.float_word(eps),
    )


def rope_write(
    heads: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    layer: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """heads [tokens, query + key + value heads, head_dim]: rotates queries and keys in place, and writes keys
    and values into the layer. cos, sin [tokens, 1, head_dim / 2]; norm [query + key heads, head_dim] and eps
    of an RMSNorm over each head before it turns."""
    tokens = heads.shape[0]
    if not tokens:
        return
    block = _rope_words(heads, num_heads, layer, norm, eps)
    for place, value in rope_places(cos, sin, blocks, offsets).items():
        block[place] = value
    together = block[words.TOGETHER]
    cpu_threads.run(_rope_code(heads, norm), block, _threads(-(-tokens // together)))


def rope_phase(
    heads: Tensor, num_heads: int, layer: Tensor, norm: Tensor | None, eps: float, name: str = ""
) -> Phase:
    """The same as a part of a program, whose words want `rope_places` before each run; heads: of as many
    tokens as may come."""
    return Phase(_rope_code(heads, norm), _rope_words(heads, num_heads, layer, norm, eps), _fit_rope, name)


def rope_places(cos: Tensor, sin: Tensor, blocks: Tensor, offsets: Tensor) -> dict[int, int]:
    """The words that a step's own tensors make, which must outlive the run."""
    return {
        words.COS: cos.data_ptr(),
        words.SIN: sin.data_ptr(),
        words.BLOCKS: blocks.data_ptr(),
        words.OFFSETS: offsets.data_ptr(),
    }


def _fit_rope(tokens: int) -> dict[int, int]:
    # Neighbours of a chunk share a block, whose keys lie across its cache lines: they are one thread's.
    together = max(1, min(BLOCK_SIZE, tokens // (4 * torch.get_num_threads())))
    return {words.ITEM: 0, words.ROWS: tokens, words.TOGETHER: together}


def _rope_words(heads: Tensor, num_heads: int, layer: Tensor, norm: Tensor | None, eps: float) -> array[int]:
    size, head_dim = heads.element_size(), heads.shape[-1]
    block = cpu_threads.words_of(*(0,) * words.SIZE)
    fixed = {
        words.X: heads.data_ptr(),
        words.X_ROW: heads.stride(0) * size,
        words.PAIRS: head_dim // 2,
        words.HEADS: num_heads,
        words.KV_HEADS: layer.shape[2],
        words.HEAD_DIM: head_dim,
        words.LAYER: layer.data_ptr(),
        words.BLOCK_BYTES: layer.stride(0) * size,
        words.VALUES: layer.stride(1) * size,
        words.HEAD_BYTES: layer.stride(2) * size,
        words.NORM: 0 if norm is None else norm.data_ptr(),
        words.NORM_EPS: cpu_threads.float_word(eps),
    }
    for place, value in (fixed | _fit_rope(heads.shape[0])).items():
        block[place] = value
    return block


def _rope_code(heads: Tensor, norm: Tensor | None) -> int:
    return _rope_write(heads.dtype, heads.dtype if norm is None else norm.dtype)


def _threads(items: int) -> int:
    return max(1, min(torch.get_num_threads(), items))


@cache
def _norm(dtype: torch.dtype, weight: torch.dtype) -> int:
    from pagemill.kernels.small_cpu_kernel import compile_norm

    return compile_norm(int(dtype == torch.bfloat16), int(weight == torch.bfloat16))


@cache
def _rope_write(dtype: torch.dtype, norm: torch.dtype) -> int:
    from pagemill.kernels.small_cpu_kernel import compile_rope_write

    return compile_rope_write(int(dtype == torch.bfloat16), int(norm == torch.bfloat16))
