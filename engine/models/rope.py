"""The frequencies of rotary embedding under each scaling, computed in the order that transformers uses.

Knows a RopeSpec and tensors; it may not know configs or files.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagemill.engine.models.spec import RopeSpec
from pagemill.kernels.rotary import rope_angles


class Rope:
    """One rotary embedding of a model, ready to turn positions into angles."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        self.spec = spec
        self.frequencies = inverse_frequencies(spec, head_dim).to(device)
        self.long_frequencies = (
            inverse_frequencies(spec, head_dim, long=True).to(device) if spec.long_divisors else None
        )

    def angles(self, positions: Tensor, long: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [tokens, 1, rotated / 2]; long: True for tokens of longer texts than the original."""
        frequencies = self.frequencies
        if self.long_frequencies is not None and long is not None:
            frequencies = torch.where(long.unsqueeze(-1), self.long_frequencies, frequencies)
        return rope_angles(positions, frequencies, dtype, self.spec.attention_factor)


def inverse_frequencies(rope: RopeSpec, head_dim: int, *, long: bool = False) -> Tensor:
    """Angle per position of each dimension pair, float32 [rotated / 2]; long: of longrope's second set."""
    dim = rope.rotated or head_dim
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    divisors = rope.long_divisors if long else rope.divisors
    if rope.scaling == "yarn":
        return _yarn(powers, rope, dim)
    if divisors:
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * powers)
    if rope.scaling == "linear":
        return 1.0 / powers / rope.factor
    return _llama3(1.0 / powers, rope) if rope.scaling == "llama3" else 1.0 / powers


def _llama3(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Llama 3.1: wavelengths beyond the original context are stretched, short ones kept, others blended."""
    wavelengths = 2 * math.pi / frequencies
    stretched = frequencies / rope.factor
    turns = rope.original_context / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * stretched + blend * frequencies
    slow = wavelengths > rope.original_context / rope.low_freq_factor
    fast = wavelengths < rope.original_context / rope.high_freq_factor
    return torch.where(slow, stretched, torch.where(fast, frequencies, blended))


def _yarn(powers: Tensor, rope: RopeSpec, dim: int) -> Tensor:
    """YaRN: pairs that turn often within the original context are kept, those that turn seldom stretched,
    and between the two borders it goes over in a straight line."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(rope.original_context / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    stretch = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - stretch
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
