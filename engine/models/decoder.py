"""The one decoder: token ids and positions in, hidden states and logits out.

It may not know where its weights come from (a function gives them by name), nor rows, requests or
sampling. Weight names are those of transformers' Llama; a family or a file format that calls them
otherwise translates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.models.spec import DecoderSpec, RopeSpec
from pagemill.kernels.activation import silu_mul
from pagemill.kernels.attention import PackedRows, paged_attention
from pagemill.kernels.cache_write import write_kv
from pagemill.kernels.linear import Linear
from pagemill.kernels.norm import add_rms_norm, rms_norm
from pagemill.kernels.rotary import apply_rope, rope_angles

# A dense layer [tokens, in] -> [tokens, out], and what makes one of its weight [out, in] and bias.
Dense = Callable[[Tensor], Tensor]
MakeDense = Callable[[Tensor, Tensor | None], Dense]
# Gives a weight by name, in the model's dtype and on its device; raises when it is missing or misshapen.
Take = Callable[[str, tuple[int, ...]], Tensor]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tokens of one step, packed; int64 vectors [tokens].

    blocks, offsets: where each token's keys and values go. fresh_blocks: blocks whose first token is in
    this step. rows: which tokens belong together, for attention.
    """

    token_ids: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    fresh_blocks: Tensor
    rows: PackedRows


class Layer:
    """One attention block and one feed-forward block with their norms."""

    def __init__(self, spec: DecoderSpec, index: int, take: Take, make_dense: MakeDense) -> None:
        self.spec = spec
        self.index = index
        hidden, inner = spec.hidden_size, spec.intermediate_size
        name = f"model.layers.{index}"
        self.input_norm = take(f"{name}.input_layernorm.weight", (hidden,))
        self.post_norm = take(f"{name}.post_attention_layernorm.weight", (hidden,))
        # Projections that read the same input are one product.
        qkv = [("q_proj", spec.query_size), ("k_proj", spec.kv_size), ("v_proj", spec.kv_size)]
        self.qkv = _joined(make_dense, take, f"{name}.self_attn", qkv, hidden, spec.qkv_bias)
        self.output = _joined(
            make_dense, take, f"{name}.self_attn", [("o_proj", hidden)], spec.query_size, spec.output_bias
        )
        gate_up = [("gate_proj", inner), ("up_proj", inner)]
        self.gate_up = _joined(make_dense, take, f"{name}.mlp", gate_up, hidden, spec.mlp_bias)
        self.down = _joined(make_dense, take, f"{name}.mlp", [("down_proj", hidden)], inner, spec.mlp_bias)

    def __call__(
        self, x: Tensor, residual: Tensor, angles: tuple[Tensor, Tensor], layer: Tensor, rows: Inputs
    ) -> Tensor:
        """x is the block's normalised input; `residual` grows in place; returns what is to be added next."""
        attended = self._attend(x, angles, layer, rows)
        x = add_rms_norm(attended, residual, self.post_norm, self.spec.norm_eps)
        return self.down(silu_mul(self.gate_up(x)))

    def _attend(self, x: Tensor, angles: tuple[Tensor, Tensor], layer: Tensor, inputs: Inputs) -> Tensor:
        spec = self.spec
        heads = self.qkv(x).view(x.shape[0], -1, spec.head_dim)
        rotated = apply_rope(heads[:, : spec.num_heads + spec.num_kv_heads], *angles)
        query, keys = rotated[:, : spec.num_heads], rotated[:, spec.num_heads :]
        values = heads[:, spec.num_heads + spec.num_kv_heads :]
        write_kv(layer, keys, values, inputs.blocks, inputs.offsets)
        out = paged_attention(query, layer, inputs.rows, spec.head_dim**-0.5)
        return self.output(out.view(x.shape[0], spec.query_size))


class Decoder:
    """A whole model. `take` is asked once for each weight, in the order they are used.

    make_dense: how dense layers are computed, the head's too; embedding and norms keep the dtype of `take`.
    """

    def __init__(
        self, spec: DecoderSpec, take: Take, has: Callable[[str], bool], make_dense: MakeDense = Linear
    ) -> None:
        self.spec = spec
        shape = (spec.vocab_size, spec.hidden_size)
        # Tied checkpoints come with either name or with both, and where both are there and differ the
        # head's own counts, as in transformers.
        embedding = EMBEDDING if has(EMBEDDING) or not (spec.tied and has(HEAD)) else HEAD
        head = EMBEDDING if spec.tied and not has(HEAD) else HEAD
        self.embedding = take(embedding, shape)
        self.layers = [Layer(spec, i, take, make_dense) for i in range(spec.num_layers)]
        self.norm = take("model.norm.weight", (spec.hidden_size,))
        self.head = make_dense(self.embedding if head == embedding else take(head, shape), None)
        self.frequencies = inverse_frequencies(spec.rope, spec.head_dim).to(self.embedding.device)

    def hidden(self, inputs: Inputs, storage: KVStorage) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm; writes the tokens' keys and values."""
        storage.clear(inputs.fresh_blocks)
        residual = F.embedding(inputs.token_ids, self.embedding)
        angles = rope_angles(inputs.positions, self.frequencies, residual.dtype)
        update = None
        for i, layer in enumerate(self.layers):
            if update is None:
                x = rms_norm(residual, layer.input_norm, self.spec.norm_eps)
            else:
                x = add_rms_norm(update, residual, layer.input_norm, self.spec.norm_eps)
            update = layer(x, residual, angles, storage.layer(i), inputs)
        assert update is not None
        return add_rms_norm(update, residual, self.norm, self.spec.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] in float32 of the hidden states of rows that sample."""
        return self.head(hidden).float()


def _joined(
    make_dense: MakeDense,
    take: Take,
    prefix: str,
    parts: list[tuple[str, int]],
    in_features: int,
    bias: bool,
) -> Dense:
    weights = [take(f"{prefix}.{name}.weight", (size, in_features)) for name, size in parts]
    biases = [take(f"{prefix}.{name}.bias", (size,)) for name, size in parts] if bias else []
    return make_dense(
        weights[0] if len(weights) == 1 else torch.cat(weights),
        torch.cat(biases) if biases else None,
    )


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Angle per position of each dimension pair, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "llama3":
        frequencies = _llama3(frequencies, rope)
    if rope.divisors:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    return frequencies


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
