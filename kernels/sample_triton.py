"""Launches sampling in Triton, for sample.py; not to be imported where triton may be missing.

Nothing here waits for the device or depends on its values, so that it can be part of a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pagemill.kernels.sample_triton_kernel import logprobs_kernel, pick_kernel, survey_kernel, weigh_kernel
from pagemill.kernels.variants import FP_FUSION, Variant

# A program weighs CHUNK tokens; the largest of each BLOCK bounds what a filter may keep.
CHUNK, BLOCK = 4096, 128
# Candidates of a row that are gathered; where there are more, the row itself is searched. TILE at a time.
ROOM, TILE = 8192, 2048
SPLIT_WARPS, ROW_WARPS = 8, 8


class _Rows:
    """Logits [rows, vocabulary] float32, a row's together, and what every launch over them is given."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.rows, self.vocabulary = logits.shape
        self.parts = triton.cdiv(self.vocabulary, CHUNK)
        self.blocks = self.parts * (CHUNK // BLOCK)
        self.maxima = self.empty(torch.float32, self.blocks)
        self.masses = self.empty(torch.float64, self.parts)
        self.scores = self.empty(torch.float32, self.parts)
        self.indices = self.empty(torch.int32, self.parts)

    def empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((self.rows, *shape), dtype=dtype, device=self.logits.device)

    def survey(self) -> None:
        survey_kernel[(self.rows, self.parts)](
            self.logits,
            self.maxima,
            self.logits.stride(0),
            self.vocabulary,
            self.blocks,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            num_warps=SPLIT_WARPS,
            num_stages=1,
            enable_fp_fusion=FP_FUSION,
        )

    def weigh(self, filters: tuple[Tensor, ...], *, choose: bool) -> None:
        """filters: temperature, top_k, top_p, min_p and keys of each row."""
        weigh_kernel[(self.rows, self.parts)](
            self.logits,
            self.maxima,
            *filters,
            self.masses,
            self.scores,
            self.indices,
            self.logits.stride(0),
            self.vocabulary,
            self.blocks,
            self.parts,
            CHOOSE=choose,
            CHUNK=CHUNK,
            BLOCKS=triton.next_power_of_2(self.blocks),
            num_warps=SPLIT_WARPS,
            num_stages=1,
            enable_fp_fusion=FP_FUSION,
        )

    def sizes(self) -> dict[str, int]:
        return row_constexprs(self.vocabulary)


def row_constexprs(vocabulary: int) -> dict[str, int]:
    parts = triton.cdiv(vocabulary, CHUNK)
    blocks = triton.next_power_of_2(parts * (CHUNK // BLOCK))
    return {"BLOCKS": blocks, "PARTS": triton.next_power_of_2(parts), "ROOM": ROOM, "TILE": TILE}


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    """sample.sample_tokens; all tensors contiguous, but logits may have gaps between rows."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if not tokens.numel():
        return tokens
    rows = _Rows(logits)
    filters = (temperature, top_k, top_p, min_p, keys)
    rows.survey()
    rows.weigh(filters, choose=True)
    pick_kernel[(rows.rows,)](
        logits,
        rows.maxima,
        *filters,
        rows.masses,
        rows.scores,
        rows.indices,
        rows.empty(torch.float32, ROOM),
        rows.empty(torch.int32, ROOM),
        tokens,
        logits.stride(0),
        rows.vocabulary,
        rows.blocks,
        rows.parts,
        **rows.sizes(),
        num_warps=ROW_WARPS,
        num_stages=1,
        enable_fp_fusion=FP_FUSION,
    )
    return tokens


def best_tokens(logits: Tensor) -> Tensor:
    """sample.best_tokens: a temperature of 0 everywhere."""
    zeros = torch.zeros(logits.shape[0], device=logits.device)
    whole = zeros.to(torch.int64)
    return sample_tokens(logits, zeros, whole, zeros, zeros, torch.stack([whole, whole], 1).to(torch.int32))


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """sample.token_logprobs; of equal log-probabilities the lower id comes first."""
    rows = _Rows(logits)
    top = min(top, rows.vocabulary)
    own, values = rows.empty(torch.float32), rows.empty(torch.float32, top)
    best = rows.empty(torch.int64, top)
    if not rows.rows:
        return own, values, best
    rows.survey()
    rows.weigh((rows.maxima,) * 5, choose=False)
    logprobs_kernel[(rows.rows,)](
        logits,
        rows.maxima,
        rows.masses,
        tokens,
        rows.empty(torch.float32, ROOM),
        rows.empty(torch.int32, ROOM),
        own,
        values,
        best,
        logits.stride(0),
        rows.vocabulary,
        rows.blocks,
        rows.parts,
        top,
        **rows.sizes(),
        num_warps=ROW_WARPS,
        num_stages=1,
        enable_fp_fusion=FP_FUSION,
    )
    return own, values, best


VOCABULARIES = {"v49k": 49_152, "v128k": 128_256, "v256k": 262_144}
_ROW = {
    "temperature": "*fp32:16",
    "top_k": "*i64:16",
    "top_p": "*fp32:16",
    "min_p": "*fp32:16",
    "keys": "*i32:16",
}
_PARTS = {"masses": "*fp64:16", "scores": "*fp32:16", "indices": "*i32:16"}
_SIZES = {"stride": "i32:16", "vocabulary": "i32:16", "blocks": "i32:16"}
_LOGITS = {"logits": "*fp32:16", "maxima": "*fp32:16"}
_ROOMS = {"values": "*fp32:16", "places": "*i32:16"}


def variants() -> list[Variant]:
    """The sizes of vocabularies from SmolLM2's to Gemma 3's."""
    found = [
        Variant(survey_kernel, "any", {**_LOGITS, **_SIZES}, {"CHUNK": CHUNK, "BLOCK": BLOCK}, SPLIT_WARPS, 1)
    ]
    for name, vocabulary in VOCABULARIES.items():
        sizes = row_constexprs(vocabulary)
        pick = {**_LOGITS, **_ROW, **_PARTS, **_ROOMS, "tokens": "*i64:16", **_SIZES, "parts": "i32"}
        weigh = {**_LOGITS, **_ROW, **_PARTS, **_SIZES, "parts": "i32"}
        constexprs = {"CHOOSE": True, "CHUNK": CHUNK, "BLOCKS": sizes["BLOCKS"]}
        found.append(Variant(pick_kernel, name, pick, sizes, ROW_WARPS, 1))
        found.append(Variant(weigh_kernel, name, weigh, constexprs, SPLIT_WARPS, 1))
    # Without filters any pointer stands where theirs would.
    masses = {**_LOGITS, **dict.fromkeys(_ROW, "*fp32:16"), **_PARTS, **_SIZES, "parts": "i32"}
    constexprs = {"CHOOSE": False, "CHUNK": CHUNK, "BLOCKS": row_constexprs(128_256)["BLOCKS"]}
    found.append(Variant(weigh_kernel, "v128k-masses", masses, constexprs, SPLIT_WARPS, 1))
    logprobs = {**_LOGITS, "masses": "*fp64:16", "tokens": "*i64:16", **_ROOMS}
    logprobs |= {"own": "*fp32:16", "best_values": "*fp32:16", "best_tokens": "*i64:16"}
    logprobs |= {**_SIZES, "parts": "i32", "top": "i32"}
    return [*found, Variant(logprobs_kernel, "v128k", logprobs, row_constexprs(128_256), ROW_WARPS, 1)]
