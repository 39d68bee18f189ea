"""Norms, activations and rotary embedding against transformers' own modules."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from pagemill.kernels.activation import silu_mul
from pagemill.kernels.norm import rms_norm
from pagemill.kernels.rotary import apply_rope, rope_angles

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_transformers(dtype: torch.dtype) -> None:
    reference = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    torch.nn.init.normal_(reference.weight)
    x = (torch.randn(7, 96) * 30).to(dtype)
    with torch.no_grad():
        assert torch.equal(rms_norm(x.clone(), reference.weight, 1e-5), reference(x))


def test_a_row_that_overflows_is_not_finite() -> None:
    normed = rms_norm(torch.tensor([[1.0, torch.inf], [1.0, 2.0]]), torch.ones(2), 1e-6)
    assert not normed[0].isfinite().all()
    assert normed[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_gates_the_second_half_with_the_first(dtype: torch.dtype) -> None:
    gate, up = torch.randn(6, 40).to(dtype), torch.randn(6, 40).to(dtype)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(silu_mul(torch.cat([gate, up], -1)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_rope_is_transformers(head_dim: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 5, 1000, 100_000])
    frequencies = 1.0 / (10_000.0 ** (torch.arange(0, head_dim, 2) / head_dim))
    query, key = torch.randn(5, 6, head_dim).to(dtype), torch.randn(5, 2, head_dim).to(dtype)
    angles = rope_angles(positions, frequencies, dtype)
    rotated = apply_rope(torch.cat([query, key], 1), *angles)
    doubled = torch.cat([positions[:, None] * frequencies] * 2, -1)
    expected = apply_rotary_pos_emb(query, key, doubled.cos().to(dtype), doubled.sin().to(dtype))
    torch.testing.assert_close(
        rotated, torch.cat(expected, 1), rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 2e-2
    )
