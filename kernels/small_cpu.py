"""Small operations between the dense layers, float32 on CPU: one call each where torch makes four to ten.

Thirty layers of ten-microsecond calls are milliseconds a step. Called by norm.py and rope_write.py, which
hold the same in torch.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from pagemill.kernels import cpu_threads
from pagemill.kernels import small_cpu_words as words
from pagemill.kernels.cpu_threads import why_not_compiled


def serves(x: Tensor) -> bool:
    """Whether x [tokens, ...] is for the functions here."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.shape[-1] % 16 == 0
        and x.stride(-1) == 1
        and why_not_compiled() is None
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape)
    if not x.shape[0]:
        return out
    block = cpu_threads.words_of(
        *(0,) * words.ROWS,
        x.shape[0],
        x.data_ptr(),
        x.stride(0) * 4,
        out.data_ptr(),
        x.shape[1],
        weight.data_ptr(),
        cpu_threads.float_word(eps),
    )
    cpu_threads.run(_norm(), block, _threads(x.shape[0] // words.ROWS_A_TIME))
    return out


def rope_write(
    heads: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    layer: Tensor,
    blocks: Tensor,
    offsets: Tensor,
) -> None:
    """heads [tokens, query + key + value heads, head_dim]: rotates queries and keys in place, and writes keys
    and values into the layer. cos, sin [tokens, 1, head_dim / 2]."""
    tokens, _, head_dim = heads.shape
    if not tokens:
        return
    block = cpu_threads.words_of(
        *(0,) * words.ROWS,
        tokens,
        heads.data_ptr(),
        heads.stride(0) * 4,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[-1],
        num_heads,
        layer.shape[2],
        head_dim,
        layer.data_ptr(),
        layer.stride(0) * 4,
        layer.stride(1) * 4,
        layer.stride(2) * 4,
        blocks.data_ptr(),
        offsets.data_ptr(),
    )
    cpu_threads.run(_rope_write(), block, _threads(tokens))


def _threads(items: int) -> int:
    return max(1, min(torch.get_num_threads(), items))


@cache
def _norm() -> int:
    from pagemill.kernels.small_cpu_kernel import compile_norm

    return compile_norm()


@cache
def _rope_write() -> int:
    from pagemill.kernels.small_cpu_kernel import compile_rope_write

    return compile_rope_write()
