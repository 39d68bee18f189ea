"""The Llama family: Llama 2 and 3.x, SmolLM2, and whoever else ships under the same architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.fields import Fields
from pagemill.engine.models.spec import DecoderSpec, RopeSpec

ARCHITECTURE = "LlamaForCausalLM"

# llama.cpp's converter stores Llama 3.1's rope scaling as a tensor of divisors, one for each frequency.
ROPE_FREQS = "rope_freqs.weight"

# Names of a GGUF file's tensors for ours; a layer's carry `blk.<i>.` for `model.layers.<i>.`.
GGUF_NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "self_attn.q_proj.": "attn_q.",
    "self_attn.k_proj.": "attn_k.",
    "self_attn.v_proj.": "attn_v.",
    "self_attn.o_proj.": "attn_output.",
    "mlp.gate_proj.": "ffn_gate.",
    "mlp.up_proj.": "ffn_up.",
    "mlp.down_proj.": "ffn_down.",
}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """From a transformers config.json; what is absent has the default of transformers' LlamaConfig."""
    fields = Fields(config, "config.json")
    hidden = fields.integer("hidden_size", 4096)
    heads = fields.integer("num_attention_heads", 32)
    context = fields.integer("max_position_embeddings", 2048)
    head_dim = fields.integer("head_dim", hidden // heads)
    fields.must_equal("hidden_act", "silu", "silu")
    bias = fields.boolean("attention_bias", False)
    return check(
        DecoderSpec(
            architecture=ARCHITECTURE,
            vocab_size=fields.integer("vocab_size", 32000),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size", 11008),
            num_layers=fields.integer("num_hidden_layers", 32),
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            context=context,
            rope=_rope_from_config(fields, context),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=fields.boolean("mlp_bias", False),
            tied=fields.boolean("tie_word_embeddings", False),
        )
    )


def _rope_from_config(fields: Fields, context: int) -> RopeSpec:
    """transformers 5 writes `rope_parameters`, earlier releases `rope_theta` and `rope_scaling`."""
    rope = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, "config.json")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    rope.must_equal("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0), 1.0)
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", factor=rope.number("factor"))
    if kind == "llama3":
        return RopeSpec(
            theta,
            "llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context=rope.integer("original_max_position_embeddings", context),
        )
    raise ModelLoadError(
        f"The model's rope scaling is {kind!r}; this version computes default, linear and llama3 only."
    )


def spec_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
) -> DecoderSpec:
    """From a GGUF file's metadata, the shapes of its tensors, and one tensor that is really configuration."""
    fields = Fields(metadata, "the GGUF metadata", prefix="llama.")
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    fields.must_equal("attention.value_length", head_dim, head_dim)
    fields.must_equal("rope.dimension_count", head_dim, head_dim)
    fields.must_equal("expert_count", 0, 0)
    bias = "blk.0.attn_q.bias" in shapes
    return check(
        DecoderSpec(
            architecture=ARCHITECTURE,
            vocab_size=shapes.get("token_embd.weight", (0,))[0],
            hidden_size=hidden,
            intermediate_size=fields.integer("feed_forward_length"),
            num_layers=fields.integer("block_count"),
            num_heads=heads,
            num_kv_heads=fields.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            context=fields.integer("context_length"),
            rope=_rope_from_gguf(fields, read(ROPE_FREQS) if ROPE_FREQS in shapes else None),
            qkv_bias=bias,
            output_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_gate.bias" in shapes,
            tied="output.weight" not in shapes,
        )
    )


def _rope_from_gguf(fields: Fields, factors: Tensor | None) -> RopeSpec:
    theta = fields.number("rope.freq_base", 10000.0)
    kind = fields.text("rope.scaling.type", "none")
    divisors = tuple(factors.tolist()) if factors is not None else ()
    if kind == "none":
        return RopeSpec(theta, divisors=divisors)
    if kind == "linear":
        return RopeSpec(theta, "linear", factor=fields.number("rope.scaling.factor"), divisors=divisors)
    raise ModelLoadError(f"The model's rope scaling is {kind!r}; this version computes none and linear only.")


def gguf_name(name: str) -> str:
    """The GGUF name of one of our weights."""
    if name.startswith("model.layers."):
        _, _, index, rest = name.split(".", 3)
        part = next(ours for ours in GGUF_NAMES if rest.startswith(ours))
        return f"blk.{index}.{GGUF_NAMES[part]}{rest.removeprefix(part)}"
    part = next(ours for ours in GGUF_NAMES if name.startswith(ours))
    return GGUF_NAMES[part] + name.removeprefix(part)


def gguf_interleaved_heads(name: str, spec: DecoderSpec) -> int:
    """How many heads of this weight have their rows in llama.cpp's order (pairs side by side); 0 for none.

    llama.cpp rotates dimensions 2i and 2i + 1; transformers, and we, i and i + head_dim / 2. Its
    converter reorders the rows of the query and key projections, so they are put back when read.
    """
    if ".q_proj." in name:
        return spec.num_heads
    return spec.num_kv_heads if ".k_proj." in name else 0


def check(spec: DecoderSpec) -> DecoderSpec:
    """Refuses what the decoder would compute wrongly or not at all."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelLoadError(
            f"The model has {spec.num_heads} attention heads, not a multiple of its {spec.num_kv_heads} "
            "key-value heads."
        )
    if spec.rope.divisors and len(spec.rope.divisors) != spec.head_dim // 2:
        raise ModelLoadError(
            f"{ROPE_FREQS} holds {len(spec.rope.divisors)} divisors for {spec.head_dim // 2} frequencies."
        )
    if spec.head_dim % 2:
        raise ModelLoadError(f"The model's head size {spec.head_dim} is odd; rotary embedding needs pairs.")
    return spec
