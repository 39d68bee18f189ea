"""A decoder's shape as far as arithmetic goes: how many multiplications and bytes a token takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a gated decoder. heads, kv_heads: of `head_dim` each. The default is SmolLM2-135M."""

    layers: int = 30
    hidden: int = 576
    intermediate: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocabulary: int = 49_152

    def layer_products(self) -> dict[str, tuple[int, int]]:
        """A layer's matrix products as (in, out), query, key and value as one, gate and up as one."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (self.hidden, query + 2 * kv),
            "o": (query, self.hidden),
            "gate_up": (self.hidden, 2 * self.intermediate),
            "down": (self.intermediate, self.hidden),
        }

    def products(self) -> dict[str, tuple[int, int]]:
        return {**self.layer_products(), "head": (self.hidden, self.vocabulary)}

    @property
    def layer_weights(self) -> int:
        """Numbers in the weights of all layers."""
        return self.layers * sum(inner * outer for inner, outer in self.layer_products().values())

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def kv_numbers(self) -> int:
        """Numbers kept for each token: keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def attention_flops(self, context: int) -> int:
        """Of one token that looks at `context` earlier ones: scores, then the weighted sum of values."""
        return 4 * self.layers * self.heads * self.head_dim * context

    def record(self) -> dict[str, Any]:
        return asdict(self)


def shape_of(model: Path) -> Shape:
    """Of a model on disk, from its header; raises ModelLoadError where the engine has no family for it."""
    from pagemill.engine.errors import ModelLoadError
    from pagemill.engine.models.spec import DecoderSpec
    from pagemill.engine.weights.load import open_checkpoint

    spec = open_checkpoint(model).spec
    if not isinstance(spec, DecoderSpec):
        raise ModelLoadError(f"{model} runs through transformers; its products are not known here.")
    return Shape(
        spec.num_layers,
        spec.hidden_size,
        spec.intermediate_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.vocab_size,
    )
