"""Gated activations in Triton against their torch forms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagemill.kernels import activation_triton

pytestmark = pytest.mark.usefixtures("poisoned")

# Interpreted, a number is cut to bfloat16 and not rounded.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (1, 1), (3, 1025), (2, 96)])
def test_it_is_the_torch_form(
    device: torch.device, gelu: bool, dtype: torch.dtype, tokens: int, width: int
) -> None:
    # Rows with gaps, and numbers where either function is steep, flat and next to nothing.
    gate_up = (6 * torch.randn(tokens, 2, 2 * width, device=device)).to(dtype)[:, 1]
    gate, up = gate_up.chunk(2, dim=-1)
    active = F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)
    found = activation_triton.gate(gate_up, gelu=gelu)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        found, active * up, rtol=8 * eps if dtype is torch.float32 else 2 * eps, atol=1e-5
    )


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("dtype", DTYPES)
def test_fresh_numbers_each_time(device: torch.device, dtype: torch.dtype) -> None:
    for gelu in (False, True):
        test_it_is_the_torch_form(device, gelu, dtype, 3, int(torch.randint(1, 300, ())))


def test_large_gates_neither_overflow_nor_give_nan(device: torch.device) -> None:
    gate = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4]], device=device)
    found = activation_triton.gate(torch.cat([gate, torch.ones_like(gate)], 1), gelu=False)
    assert found.tolist() == [[0.0, 0.0, 0.0, 200.0, 1e4]]
    found = activation_triton.gate(torch.cat([gate, torch.ones_like(gate)], 1), gelu=True)
    assert found.tolist() == [[0.0, 0.0, 0.0, 200.0, 1e4]]
