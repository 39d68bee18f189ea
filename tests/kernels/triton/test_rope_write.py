"""Norm, rotation, rounding and write in one Triton kernel against the torch forms, one after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagemill.kernels import rope_write_triton
from pagemill.kernels.cache_write import (
    read_scaled_keys,
    read_scaled_values,
    write_kv,
    write_scaled_kv,
)
from pagemill.kernels.norm import rms_norm_torch
from pagemill.kernels.rotary import apply_rope, rope_angles

pytestmark = pytest.mark.usefixtures("poisoned")

NUM_HEADS, KV_HEADS = 4, 2
# Interpreted, a number is cut to bfloat16 and not rounded.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


class Step:
    """Random heads, angles and places of some tokens; no two places are the same."""

    def __init__(
        self, device: torch.device, tokens: int, head_dim: int, half: int, dtype: torch.dtype
    ) -> None:
        self.angles = rope_angles(
            torch.arange(100, 100 + tokens, device=device), torch.rand(half, device=device), dtype
        )
        whole = torch.randn(tokens, 2, NUM_HEADS + 2 * KV_HEADS, head_dim, device=device).to(dtype)
        self.heads = whole[:, 1]
        places = torch.randperm(tokens + 40, device=device)[:tokens]
        self.places = (places // 16, places % 16)
        self.blocks = (tokens + 40) // 16 + 1

    def storage(self, dtype: torch.dtype, fill: float) -> Tensor:
        shape = (self.blocks, 3, 2, KV_HEADS, self.heads.shape[-1] * 16)
        return torch.full(shape, fill, device=self.heads.device).to(dtype)

    def turned(self, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        turning = self.heads[:, : NUM_HEADS + KV_HEADS]
        if norm is not None:
            turning = rms_norm_torch(turning, norm, eps)
        rotated = apply_rope(turning, *self.angles)
        return rotated[:, :NUM_HEADS], rotated[:, NUM_HEADS:], self.heads[:, NUM_HEADS + KV_HEADS :]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "head_dim", "half"),
    [
        (0, 64, 32),
        (35, 64, 32),
        (1, 80, 40),
        (16, 96, 48),
        (17, 96, 36),
        (3, 128, 64),
        (5, 80, 10),
        (2, 256, 128),
    ],
)
def test_without_a_norm_it_is_rope_and_then_write_to_the_bit(
    device: torch.device, dtype: torch.dtype, tokens: int, head_dim: int, half: int
) -> None:
    step = Step(device, tokens, head_dim, half, dtype)
    expected, found = step.storage(dtype, 77.0), step.storage(dtype, 77.0)
    query, keys, values = (part.clone() for part in step.turned(None, 0.0))
    write_kv(expected[:, 1], keys, values, *step.places)
    rope_write_triton.rope_write(step.heads, NUM_HEADS, *step.angles, found[:, 1], *step.places)
    tight = {"rtol": 0.0, "atol": 0.0} if device.type == "cpu" or dtype is not torch.float32 else {}
    torch.testing.assert_close(step.heads[:, :NUM_HEADS], query, **tight)
    torch.testing.assert_close(found, expected, **tight)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("dtype", DTYPES)
def test_fresh_numbers_each_time(device: torch.device, dtype: torch.dtype) -> None:
    tokens = int(torch.randint(1, 40, ()))
    test_without_a_norm_it_is_rope_and_then_write_to_the_bit(device, dtype, tokens, 64, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize(("head_dim", "half"), [(128, 64), (80, 16)])
def test_a_norm_comes_first(
    device: torch.device, dtype: torch.dtype, wide_weight: bool, head_dim: int, half: int
) -> None:
    step = Step(device, 7, head_dim, half, dtype)
    norm = torch.randn(NUM_HEADS + KV_HEADS, head_dim, device=device)
    norm = norm if wide_weight else norm.to(dtype)
    expected, found = step.storage(dtype, 77.0), step.storage(dtype, 77.0)
    query, keys, values = step.turned(norm, 1e-6)
    write_kv(expected[:, 2], keys, values, *step.places)
    rope_write_triton.rope_write(
        step.heads, NUM_HEADS, *step.angles, found[:, 2], *step.places, norm=norm, eps=1e-6
    )
    # A norm that differs in its last place is turned, and so are its neighbours.
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(step.heads[:, :NUM_HEADS], query, rtol=eps, atol=eps)
    torch.testing.assert_close(found, expected, rtol=eps, atol=eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("tokens", "head_dim", "half"), [(1, 64, 32), (21, 80, 16), (18, 128, 64)])
@pytest.mark.parametrize("normed", [False, True])
def test_eight_bits_are_those_of_the_plain_form(
    device: torch.device,
    dtype: torch.dtype,
    stored: torch.dtype,
    tokens: int,
    head_dim: int,
    half: int,
    normed: bool,
) -> None:
    step = Step(device, tokens, head_dim, half, dtype)
    step.heads[0, NUM_HEADS:] = 0
    norm = torch.randn(NUM_HEADS + KV_HEADS, head_dim, device=device) if normed else None
    expected, found = step.storage(stored, 77.0), step.storage(stored, 77.0)
    expected_scales, scales = (
        torch.full((step.blocks, 3, 2, KV_HEADS, 16), 5.0, device=device) for _ in "12"
    )
    _, keys, values = step.turned(norm, 1e-6)
    write_scaled_kv(expected[:, 1], expected_scales[:, 1], keys, values, *step.places)
    rope_write_triton.rope_write(
        step.heads,
        NUM_HEADS,
        *step.angles,
        found[:, 1],
        *step.places,
        norm=norm,
        eps=1e-6,
        scales=scales[:, 1],
    )
    # A norm that differs in its last place is turned, and so are its neighbours.
    eps = 4 * torch.finfo(dtype).eps if normed else 1e-6
    torch.testing.assert_close(scales, expected_scales, rtol=eps, atol=0)
    differences = (found.float() - expected.float()).abs()
    if device.type == "cpu" and not normed:
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert differences.max() <= (1 if stored is torch.int8 else 32)
    assert (differences > 0).float().mean() < 1e-3
    # What is read back is what was written, to half a step of the dtype.
    blocks, offsets = step.places
    read = read_scaled_keys(found[:, 1], scales[:, 1], head_dim)[blocks, :, :, offsets]
    most = keys.float().abs().amax(-1, keepdim=True)
    assert ((read - keys.float()).abs() <= most * (0.004 if stored is torch.int8 else 0.036)).all()
    read = read_scaled_values(found[:, 1], scales[:, 1], head_dim)[blocks, :, offsets]
    most = values.float().abs().amax(-1, keepdim=True)
    assert ((read - values.float()).abs() <= most * (0.004 if stored is torch.int8 else 0.036)).all()


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_a_token_that_is_not_finite_reads_back_as_nan_and_alone(
    device: torch.device, stored: torch.dtype
) -> None:
    step = Step(device, 3, 64, 32, torch.float32)
    step.heads[0, NUM_HEADS, 5] = float("nan")
    step.heads[1, NUM_HEADS + KV_HEADS, 7] = float("inf")
    found, scales = step.storage(stored, 0.0), torch.zeros(step.blocks, 3, 2, KV_HEADS, 16, device=device)
    rope_write_triton.rope_write(
        step.heads, NUM_HEADS, *step.angles, found[:, 0], *step.places, scales=scales[:, 0]
    )
    blocks, offsets = step.places
    keys = read_scaled_keys(found[:, 0], scales[:, 0], 64)[blocks, :, :, offsets]
    values = read_scaled_values(found[:, 0], scales[:, 0], 64)[blocks, :, offsets]
    assert keys.isnan().all(-1).tolist() == [[True, False], [False, False], [False, False]]
    assert values.isnan().all(-1).tolist() == [[False, False], [True, False], [False, False]]
    assert not keys[1:].isnan().any()
    assert not values[[0, 2]].isnan().any()
