"""What distinguishes one decoder from another: numbers and flags, no code.

A family that needs something new adds a field with a default that leaves the others as they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over all of a head's dimensions.

    scaling: `linear` divides every frequency by `factor`; `llama3` divides the slow ones and blends in
        between (Llama 3.1). `divisors`, one for each frequency, divides on top: GGUF files carry llama3
        scaling in this form.
    """

    theta: float
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A pre-norm decoder with gated feed-forward and grouped-query attention.

    context: most positions the model was made for. qkv_bias, output_bias: biases of the attention's
    projections; mlp_bias: of the feed-forward ones. tied: the head reads the embedding's weights unless
    the checkpoint has its own.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context: int
    rope: RopeSpec
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def parameters(self) -> int:
        """How many numbers a loaded decoder of this spec keeps, biases left out."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size
        # A tied head is stored twice on CPU: the embedding is read by row, the head in packed form.
        tables = 2 * self.vocab_size * self.hidden_size
        return self.num_layers * (attention + feed_forward + norms) + tables + self.hidden_size
