"""What distinguishes one decoder from another: numbers and flags, no code.

A family that needs something new adds a field with a default that leaves the others as they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Scaling = Literal["none", "linear", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu_tanh"]


class ModelSpec(Protocol):
    """What whoever sizes memory and names a model must know of it, whichever code computes it."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def rope_switch(self) -> int | None:
        """Texts of more tokens than this turn by other frequencies, all of their tokens; None for never."""
        ...

    def parameters(self) -> int:
        """How many numbers a loaded model keeps."""
        ...


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: which dimensions turn, and how fast.

    rotated: how many of a head's dimensions turn, the first ones; 0 for all.
    scaling: `linear` divides every frequency by `factor`; `llama3` divides the slow ones and blends in
        between (Llama 3.1), `yarn` likewise with other borders (Peng et al., 2023); `longrope` divides each
        by one of `divisors`, and in a text of more than `original_context` tokens by one of
        `long_divisors` (Ding et al., 2024).
    divisors: one for each frequency, for any scaling; GGUF files carry llama3's in this form.
    attention_factor: cosines and sines are multiplied by it (yarn, longrope).
    """

    theta: float
    scaling: Scaling = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    rotated: int = 0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A pre-norm decoder with gated feed-forward and grouped-query attention.

    context: most positions the model was made for.
    windows: for each layer how many tokens back it sees, its own included, None for all; () for none.
    window_rope: rotary embedding of the layers with a window, where theirs differs (Gemma 3).
    qkv_bias, output_bias: biases of the attention's projections; mlp_bias: of the feed-forward ones.
    qk_norm: queries and keys are normalised for each head before they turn.
    post_norms: what attention and feed-forward give is normalised too, before it is added (Gemma).
    norm_offset: what is added to norm weights; they then count in float32 (Gemma: 1).
    attention_scale: of the scores; None for 1 / sqrt(head_dim). attention_softcap, final_softcap: scores
        and logits become cap * tanh(x / cap).
    embedding_scale: embeddings are multiplied by it.
    tied: the head reads the embedding's weights unless the checkpoint has its own.
    fused_weights: query, key and value projections are one tensor of the checkpoint, gate and up another.
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
    window_rope: RopeSpec | None = None
    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    activation: Activation = "silu"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    tied: bool = False
    fused_weights: bool = False

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def rope_switch(self) -> int | None:
        return self.rope.original_context if self.rope.long_divisors else None

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def parameters(self) -> int:
        """How many numbers a loaded decoder of this spec keeps, biases left out."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        norms = (4 if self.post_norms else 2) * self.hidden_size
        # A tied head is stored twice on CPU: the embedding is read by row, the head in packed form.
        tables = 2 * self.vocab_size * self.hidden_size
        return self.num_layers * (attention + feed_forward + norms) + tables + self.hidden_size
