"""Launches shaping in Triton, for shape_logits.py; not to be imported where triton may be missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from torch import Tensor

from pagemill.kernels.shape_logits_triton_kernel import shape_logits_kernel
from pagemill.kernels.variants import FP_FUSION, Variant

if TYPE_CHECKING:
    from pagemill.kernels.shape_logits import Shaping

CHUNK, NUM_WARPS = 4096, 8


def shape_logits(logits: Tensor, slots: Tensor, shaping: Shaping) -> None:
    """shape_logits.shape_logits; tables contiguous, logits may have gaps between rows."""
    rows, vocabulary = logits.shape
    if not rows:
        return
    biases, ends = shaping.bias_tokens.shape[1], shaping.ends.shape[1]
    shape_logits_kernel[(rows, triton.cdiv(vocabulary, CHUNK))](
        logits,
        slots,
        shaping.counts,
        shaping.presence,
        shaping.frequency,
        shaping.repetition,
        shaping.bias_tokens,
        shaping.bias,
        shaping.ends,
        shaping.min_tokens,
        shaping.outputs,
        logits.stride(0),
        vocabulary,
        biases,
        ends,
        **constexprs(biases, ends),
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=FP_FUSION,
    )


def constexprs(biases: int, ends: int) -> dict[str, object]:
    """Of lists of so many places."""
    power = triton.next_power_of_2
    return {"CHUNK": CHUNK, "BIASES": max(1, power(biases)), "ENDS": max(1, power(ends))}


def variants() -> list[Variant]:
    """300 biases are what OpenAI's interface allows at most."""
    signature = {"logits": "*fp32:16", "slots": "*i64:16", "counts": "*i32:16"}
    signature |= dict.fromkeys(["presence", "frequency", "repetition"], "*fp32:16")
    signature |= {"bias_tokens": "*i32:16", "bias": "*fp32:16"}
    signature |= dict.fromkeys(["ends", "min_tokens", "outputs"], "*i32:16")
    signature |= {"stride": "i32:16", "vocabulary": "i32:16", "biases": "i32", "end_count": "i32"}
    return [Variant(shape_logits_kernel, "b300-e16", signature, constexprs(300, 16), NUM_WARPS, 1)]
