"""The one decoder: token ids and positions in, hidden states and logits out.

It may not know where its weights come from (a function gives them by name), nor rows, requests or
sampling. Weight names are those of transformers; a file format that calls them otherwise translates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.models.program import LayerProgram
from pagemill.engine.models.rope import Rope
from pagemill.engine.models.spec import DecoderSpec
from pagemill.kernels.attention import PackedRows, paged_attention
from pagemill.kernels.choice import takes_triton
from pagemill.kernels.linear import Dense, GatedLinear, Linear, MakeDense, in_float32
from pagemill.kernels.norm import add_rms_norm, rms_norm
from pagemill.kernels.rope_write import rope_write

# Gives a weight by name, in the model's dtype and on its device; raises when it is missing or misshapen.
Take = Callable[[str, tuple[int, ...]], Tensor]
# cos and sin of a step's tokens.
Angles = tuple[Tensor, Tensor]
# One layer of it, and the scales of a layer of 8 bits.
Memory = tuple[Tensor, Tensor | None]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tokens of one step, packed; int64 vectors [tokens].

    blocks, offsets: where each token's keys and values go. fresh_blocks: blocks whose first token is in
    this step. rows: which tokens belong together, for attention. long_rope: True for tokens of texts that
    have outgrown the original context [tokens], None where there are none.
    """

    token_ids: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    fresh_blocks: Tensor
    rows: PackedRows
    long_rope: Tensor | None = None


class Layer:
    """One attention block and one feed-forward block with their norms."""

    def __init__(self, spec: DecoderSpec, index: int, take: Take, make_dense: MakeDense) -> None:
        self.spec = spec
        self.window = spec.window(index)
        name = f"model.layers.{index}"
        self._take_norms(take, name)
        self._take_projections(take, name, make_dense)

    def _take_norms(self, take: Take, name: str) -> None:
        spec = self.spec

        def norm(part: str, size: int) -> Tensor:
            return _norm_weight(spec, take, f"{name}.{part}.weight", size)

        hidden = spec.hidden_size
        self.input_norm = norm("input_layernorm", hidden)
        # Without post norms the norm that follows attention in the checkpoint is the feed-forward's.
        after_attention = norm("post_attention_layernorm", hidden)
        self.attended_norm = after_attention if spec.post_norms else None
        self.mlp_norm = norm("pre_feedforward_layernorm", hidden) if spec.post_norms else after_attention
        self.given_norm = norm("post_feedforward_layernorm", hidden) if spec.post_norms else None
        self.qk_norm = None
        if spec.qk_norm:
            # One weight for each head, so that queries and keys are one call.
            query, key = (norm(f"self_attn.{kind}_norm", spec.head_dim) for kind in "qk")
            self.qk_norm = torch.stack([query] * spec.num_heads + [key] * spec.num_kv_heads)

    def _take_projections(self, take: Take, name: str, make_dense: MakeDense) -> None:
        spec = self.spec
        hidden, inner = spec.hidden_size, spec.intermediate_size
        # Projections that read the same input are one product, whether or not they are one in the file.
        qkv = [("q_proj", spec.query_size), ("k_proj", spec.kv_size), ("v_proj", spec.kv_size)]
        if spec.fused_weights:
            qkv = [("qkv_proj", spec.query_size + 2 * spec.kv_size)]
        output, down = [("o_proj", hidden)], [("down_proj", hidden)]
        self.qkv = _joined(make_dense, take, f"{name}.self_attn", qkv, hidden, spec.qkv_bias)
        self.output = _joined(
            make_dense, take, f"{name}.self_attn", output, spec.query_size, spec.output_bias
        )
        self.gated = _gated(make_dense, take, f"{name}.mlp", spec)
        self.down = _joined(make_dense, take, f"{name}.mlp", down, inner, spec.mlp_bias)

    def __call__(
        self, residual: Tensor, x: Tensor, angles: Angles, memory: Memory, inputs: Inputs, next_norm: Tensor
    ) -> Tensor:
        """`residual` [tokens, hidden] grows in place by what the two blocks add; x is its input norm.

        Returns the norm of the grown residual by `next_norm`, which is what follows this layer.
        """
        eps = self.spec.norm_eps
        attended = self._attend(x, angles, memory, inputs)
        x = _add(residual, self.output, attended, self.attended_norm, self.mlp_norm, eps)
        return _add(residual, self.down, self.gated(x), self.given_norm, next_norm, eps)

    def _attend(self, x: Tensor, angles: Angles, memory: Memory, inputs: Inputs) -> Tensor:
        spec, (layer, scales) = self.spec, memory
        heads = self.qkv(x).view(x.shape[0], -1, spec.head_dim)
        places = (layer, inputs.blocks, inputs.offsets)
        query = rope_write(
            heads, spec.num_heads, angles, *places, norm=self.qk_norm, eps=spec.norm_eps, scales=scales
        )
        cap = spec.attention_softcap
        out = paged_attention(
            query, layer, inputs.rows, spec.scale, window=self.window, softcap=cap, scales=scales
        )
        return out.view(x.shape[0], spec.query_size)


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
        self.norm = _norm_weight(spec, take, "model.norm.weight", spec.hidden_size)
        self.head = make_dense(self.embedding if head == embedding else take(head, shape), None)
        device = self.embedding.device
        self.rope = Rope(spec.rope, spec.head_dim, device)
        self.window_rope = Rope(spec.window_rope, spec.head_dim, device) if spec.window_rope else None
        self.program = LayerProgram.of(self)

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states, queries among them."""
        return self.embedding.dtype

    def hidden(self, inputs: Inputs, storage: KVStorage) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm; writes the tokens' keys and values."""
        storage.clear(inputs.fresh_blocks)
        residual = F.embedding(inputs.token_ids, self.embedding)
        if self.spec.embedding_scale != 1.0:
            # Rounded to the model's dtype before it multiplies, as transformers does.
            residual = residual * torch.tensor(self.spec.embedding_scale, dtype=residual.dtype)
        all_seeing, windowed = self._angles(inputs, residual.dtype)
        if self.program is not None and self.program.serves(storage):
            return self.program.run(residual, inputs, (all_seeing, windowed), storage)
        norms = [layer.input_norm for layer in self.layers] + [self.norm]
        x = rms_norm(residual, norms[0], self.spec.norm_eps)
        for i, layer in enumerate(self.layers):
            angles = all_seeing if layer.window is None else windowed
            memory = storage.layer(i), storage.layer_scales(i)
            x = layer(residual, x, angles, memory, inputs, norms[i + 1])
        return x

    def _angles(self, inputs: Inputs, dtype: torch.dtype) -> tuple[Angles, Angles]:
        """Of layers that see all, and of those with a window."""
        angles = self.rope.angles(inputs.positions, inputs.long_rope, dtype)
        if self.window_rope is None:
            return angles, angles
        return angles, self.window_rope.angles(inputs.positions, inputs.long_rope, dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] in float32 of the hidden states of rows that sample."""
        logits = in_float32(self.head, hidden)
        cap = self.spec.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _norm_weight(spec: DecoderSpec, take: Take, name: str, size: int) -> Tensor:
    weight = take(name, (size,))
    return weight.float() + spec.norm_offset if spec.norm_offset else weight


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


def _gated(make_dense: MakeDense, take: Take, prefix: str, spec: DecoderSpec) -> GatedLinear:
    inner, hidden = spec.intermediate_size, spec.hidden_size
    if spec.fused_weights:
        gate, up = take(f"{prefix}.gate_up_proj.weight", (2 * inner, hidden)).chunk(2)
        return GatedLinear(gate, up, activation=spec.activation, make=make_dense)
    weights = [take(f"{prefix}.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up")]
    biases = (
        [take(f"{prefix}.{name}_proj.bias", (inner,)) for name in ("gate", "up")] if spec.mlp_bias else []
    )
    return GatedLinear(*weights, *biases, activation=spec.activation, make=make_dense)


def _add(
    residual: Tensor, layer: Dense, x: Tensor, inner_norm: Tensor | None, norm: Tensor, eps: float
) -> Tensor:
    """Adds layer(x) to `residual` in place, normalised first where the family does, and norms the sum."""
    if inner_norm is None and not takes_triton(residual):
        # Compiled layers add in the same pass; on a GPU it is the norm that does.
        layer.add_to(residual, x)
        return rms_norm(residual, norm, eps)
    return add_rms_norm(residual, layer(x), norm, eps, inner_norm)
