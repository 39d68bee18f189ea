"""Small operations between the dense layers on CPU, in float32 and bfloat16: one call each where torch makes
four to ten.

Thirty layers of ten-microsecond calls are milliseconds a step. Called by norm.py and rope_write.py, which
hold the same in torch.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from pagemill.kernels import cpu_threads
from pagemill.kernels import small_cpu_words as words
from pagemill.kernels.cache_write import BLOCK_SIZE
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
    """Whether rope_write can rotate x [tokens, heads, head_dim] by cos: all of a head, in whole vectors."""
    return serves(x) and 2 * cos.shape[-1] == x.shape[-1] and cos.shape[-1] % 16 == 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [tokens, width]; a weight in bfloat16 multiplies what was rounded to it, as in norm.py."""
    out = torch.empty(x.shape, dtype=x.dtype)
    if not x.shape[0]:
        return out
    block = cpu_threads.words_of(
        *(0,) * words.ROWS,
        x.shape[0],
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        out.data_ptr(),
        x.shape[1],
        weight.data_ptr(),
        cpu_threads.float_word(eps),
    )
    cpu_threads.run(_norm(x.dtype, weight.dtype), block, _threads(x.shape[0] // words.ROWS_A_TIME))
    return out


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
    tokens, _, head_dim = heads.shape
    if not tokens:
        return
    size = heads.element_size()
    threads = torch.get_num_threads()
    # Neighbours of a chunk share a block, whose keys lie across its cache lines: they are one thread's.
    together = max(1, min(BLOCK_SIZE, tokens // (4 * threads)))
    block = cpu_threads.words_of(
        *(0,) * words.ROWS,
        tokens,
        heads.data_ptr(),
        heads.stride(0) * size,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[-1],
        num_heads,
        layer.shape[2],
        head_dim,
        layer.data_ptr(),
        layer.stride(0) * size,
        layer.stride(1) * size,
        layer.stride(2) * size,
        blocks.data_ptr(),
        offsets.data_ptr(),
        0 if norm is None else norm.data_ptr(),
        cpu_threads.float_word(eps),
        together,
    )
    code = _rope_write(heads.dtype, heads.dtype if norm is None else norm.dtype)
    cpu_threads.run(code, block, _threads(-(-tokens // together)))


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
