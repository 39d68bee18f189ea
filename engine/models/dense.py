"""What the configs of all dense decoders have in common: sizes, rope, windows, and what is wrong with them.

A family begins with what is read here and sets its own flags. May not know which family asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.family import Read, Shapes
from pagemill.engine.models.fields import Fields
from pagemill.engine.models.rope_fields import rope_from_config, rope_from_gguf
from pagemill.engine.models.spec import DecoderSpec, RopeSpec


def config_fields(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Fields:
    """A config.json; defaults: those of the family's config class in transformers."""
    return Fields(config, "config.json", defaults=defaults)


def gguf_fields(
    metadata: Mapping[str, Any], architecture: str, defaults: Mapping[str, Any] | None = None
) -> Fields:
    return Fields(metadata, "the GGUF metadata", prefix=f"{architecture}.", defaults=defaults)


def from_config(
    fields: Fields, architecture: str, rope_of: Callable[[Fields, int], RopeSpec] = rope_from_config
) -> DecoderSpec:
    """What a transformers config says of sizes, rope and tying.

    rope_of: how the family reads its rotary embedding, for heads of a size.
    """
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    head_dim = fields.optional_integer("head_dim") or hidden // heads
    rope = rope_of(fields, head_dim)
    return DecoderSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.optional_integer("num_key_value_heads") or heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps"),
        context=_stretched(fields.integer("max_position_embeddings"), rope),
        rope=rope,
        tied=fields.boolean("tie_word_embeddings", bool(fields.defaults.get("tie_word_embeddings"))),
    )


def from_gguf(fields: Fields, architecture: str, shapes: Shapes, read: Read) -> DecoderSpec:
    """What a GGUF file says of sizes, rope and tying, and which biases it holds.

    architecture: the name that transformers has for it.
    """
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    fields.must_equal("attention.value_length", head_dim, head_dim)
    fields.must_equal("expert_count", 0, 0)
    rope = rope_from_gguf(fields, head_dim, shapes, read)
    return DecoderSpec(
        architecture=architecture,
        vocab_size=shapes.get("token_embd.weight", (0,))[0],
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        context=_stretched(fields.integer("context_length"), rope),
        rope=rope,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        tied="output.weight" not in shapes,
    )


def _stretched(context: int, rope: RopeSpec) -> int:
    """YaRN is switched on by adding it to a config whose context stays as it was."""
    return max(context, int(rope.original_context * rope.factor)) if rope.scaling == "yarn" else context


def windows_from_config(
    fields: Fields, num_layers: int, window: int | None, has_window: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Each layer's window: by `layer_types` where the config has it, else where has_window(layer)."""
    types = fields.words("layer_types") or tuple(
        "sliding_attention" if has_window(i) else "full_attention" for i in range(num_layers)
    )
    if len(types) != num_layers:
        raise ModelLoadError(f"{fields.source}: layer_types names {len(types)} layers of {num_layers}.")
    if others := set(types) - {"sliding_attention", "full_attention"}:
        raise ModelLoadError(
            f"{fields.source}: layer_types has {min(others)!r}; this version computes full_attention and "
            "sliding_attention only."
        )
    if "sliding_attention" in types and window is None:
        raise ModelLoadError(f"{fields.source}: layers have a sliding window and its size is not given.")
    return every_layer([window if kind == "sliding_attention" else None for kind in types])


def windows_from_gguf(fields: Fields, num_layers: int, default_period: int) -> tuple[int | None, ...]:
    """Of each `period` layers all but the last have the window; 1 for all layers; 0 or no window for none."""
    name = "attention.sliding_window"
    if not fields.values.get(fields.prefix + name):
        return ()
    window = fields.integer(name)
    pattern = fields.values.get(f"{fields.prefix}{name}_pattern", default_period)
    if isinstance(pattern, list) and len(pattern) == num_layers:
        return every_layer([window if has_window else None for has_window in pattern])
    if not isinstance(pattern, int) or pattern < 1:
        raise ModelLoadError(f"{fields.source}: {fields.prefix}{name}_pattern is {pattern!r}.")
    if pattern == 1:
        return (window,) * num_layers
    return every_layer([window if i % pattern < pattern - 1 else None for i in range(num_layers)])


def every_layer(windows: list[int | None]) -> tuple[int | None, ...]:
    """One entry a layer, or () where none has a window."""
    return tuple(windows) if any(windows) else ()


def check(spec: DecoderSpec) -> DecoderSpec:
    """Refuses what the decoder would compute wrongly or not at all."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelLoadError(
            f"The model has {spec.num_heads} attention heads, not a multiple of its {spec.num_kv_heads} "
            "key-value heads."
        )
    if spec.head_dim % 2:
        raise ModelLoadError(f"The model's head size {spec.head_dim} is odd; rotary embedding needs pairs.")
    rotated = spec.rope.rotated or spec.head_dim
    if rotated > spec.head_dim or rotated % 2:
        raise ModelLoadError(f"{rotated} of a head's {spec.head_dim} dimensions cannot be turned in pairs.")
    for divisors in (spec.rope.divisors, spec.rope.long_divisors):
        if divisors and len(divisors) != rotated // 2:
            raise ModelLoadError(
                f"The model has {len(divisors)} divisors for {rotated // 2} frequencies of its rope."
            )
    return spec
