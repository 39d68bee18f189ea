"""Reads a RopeSpec out of a config or out of GGUF metadata; a scaling that is not computed is refused.

May not know which family asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.fields import Fields
from pagemill.engine.models.spec import RopeSpec

# llama.cpp's converter stores frequency divisors as tensors: Llama 3.1's, and longrope's two sets.
ROPE_FREQS = "rope_freqs.weight"
ROPE_SHORT = "rope_factors_short.weight"
ROPE_LONG = "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_FREQS, ROPE_SHORT, ROPE_LONG)


def rope_from_config(
    fields: Fields, head_dim: int, *, partial: bool = False, aliases: Mapping[str, str] | None = None
) -> RopeSpec:
    """transformers 5 writes `rope_parameters`, earlier releases `rope_theta` and `rope_scaling`.

    partial: whether the family may turn a part of each head only. aliases: other names of scalings.
    """
    rope = _rope_section(fields)
    theta = rope.positive("rope_theta", fields.number("rope_theta", 10000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    return replace(
        scaled(rope, (aliases or {}).get(kind, kind), theta, _contexts(fields, rope)),
        rotated=_rotated(fields, rope, head_dim, partial),
    )


def _rope_section(fields: Fields) -> Fields:
    # Where both are there the older one counts, as in transformers.
    for name in ("rope_scaling", "rope_parameters"):
        section = fields.section(name)
        if section is not None and section.values:
            return section
    return Fields({}, fields.source)


def _contexts(fields: Fields, rope: Fields) -> tuple[int, int]:
    """How many positions the model has, and how many it had before scaling.

    transformers takes the latter from the config itself before it looks into the rope parameters.
    """
    context = fields.integer("max_position_embeddings")
    name = "original_max_position_embeddings"
    return context, fields.optional_integer(name) or rope.integer(name, context)


def _rotated(fields: Fields, rope: Fields, head_dim: int, partial: bool) -> int:
    name = "partial_rotary_factor"
    if not partial:
        rope.must_equal(name, fields.number(name, 1.0), 1.0)
        return 0
    rotated = int(head_dim * rope.number(name, fields.number(name, 1.0)))
    if not 2 <= rotated <= head_dim or rotated % 2:
        raise ModelLoadError(
            f"{fields.source}: {name} turns {rotated} of a head's {head_dim} dimensions; it takes pairs."
        )
    return 0 if rotated == head_dim else rotated


def scaled(rope: Fields, kind: str, theta: float, contexts: tuple[int, int]) -> RopeSpec:
    """A rope section of that kind; contexts: the model's positions and its original ones."""
    context, original = contexts
    # `dynamic` changes nothing up to max_position_embeddings, and longer texts are not taken: there each
    # new token would turn the keys of all earlier ones again.
    if kind in ("default", "dynamic"):
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", factor=rope.positive("factor"))
    if kind == "llama3":
        return RopeSpec(
            theta,
            "llama3",
            factor=rope.positive("factor"),
            low_freq_factor=rope.positive("low_freq_factor"),
            high_freq_factor=rope.positive("high_freq_factor"),
            original_context=original,
        )
    if kind == "yarn":
        return _yarn(rope, theta, original)
    if kind == "longrope":
        return _longrope(rope, theta, context, original)
    raise ModelLoadError(
        f"The model's rope scaling is {kind!r}; this version computes default, linear, dynamic, llama3, yarn "
        "and longrope only."
    )


def _yarn(rope: Fields, theta: float, original: int) -> RopeSpec:
    factor = rope.positive("factor")
    mscale, of_all = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
    attention = rope.optional_number("attention_factor")
    if attention is None and mscale and of_all:
        attention = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, of_all)
    elif attention is None:
        attention = _yarn_magnitude(factor, 1.0)
    return RopeSpec(
        theta,
        "yarn",
        factor=factor,
        original_context=original,
        attention_factor=attention,
        beta_fast=rope.optional_number("beta_fast") or 32.0,
        beta_slow=rope.optional_number("beta_slow") or 1.0,
        truncate=rope.boolean("truncate", True),
    )


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(rope: Fields, theta: float, context: int, original: int) -> RopeSpec:
    short, long = rope.numbers("short_factor"), rope.numbers("long_factor")
    if not short or not long:
        raise ModelLoadError(f"{rope.source} lacks short_factor or long_factor.")
    factor = rope.optional_number("factor") or context / original
    attention = rope.optional_number("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeSpec(
        theta,
        "longrope",
        original_context=original,
        divisors=short,
        long_divisors=long,
        attention_factor=attention,
    )


def rope_from_gguf(
    fields: Fields, head_dim: int, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
) -> RopeSpec:
    """From a GGUF file's metadata and those of its tensors that are really configuration."""
    theta = fields.positive("rope.freq_base", 10000.0)
    kind = fields.text("rope.scaling.type", "none")
    divisors = {name: tuple(read(name).tolist()) for name in ROPE_TENSORS if name in shapes}
    if ROPE_SHORT in divisors and ROPE_LONG in divisors:
        rope = RopeSpec(
            theta,
            "longrope",
            original_context=fields.integer("rope.scaling.original_context_length"),
            divisors=divisors[ROPE_SHORT],
            long_divisors=divisors[ROPE_LONG],
            attention_factor=fields.positive("rope.scaling.attn_factor", 1.0),
        )
    elif kind == "none":
        rope = RopeSpec(theta, divisors=divisors.get(ROPE_FREQS, ()))
    elif kind == "linear" and not divisors:
        rope = RopeSpec(theta, "linear", factor=fields.positive("rope.scaling.factor"))
    elif kind == "yarn" and not divisors:
        rope = _yarn_from_gguf(fields, theta)
    else:
        with_tensors = f" with {', '.join(divisors)}" if divisors else ""
        raise ModelLoadError(
            f"The model's rope scaling is {kind!r}{with_tensors}; this version computes none, linear, yarn, "
            "and longrope with both of its tensors."
        )
    rotated = fields.integer("rope.dimension_count", head_dim)
    return replace(rope, rotated=0 if rotated == head_dim else rotated)


def _yarn_from_gguf(fields: Fields, theta: float) -> RopeSpec:
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
        # llama.cpp multiplies by these where transformers replaces: which of the two a file means is unknown.
        fields.must_equal(f"rope.scaling.{name}", 1.0, 1.0)
    factor = fields.positive("rope.scaling.factor")
    return RopeSpec(
        theta,
        "yarn",
        factor=factor,
        original_context=fields.integer("rope.scaling.original_context_length"),
        attention_factor=_yarn_magnitude(factor, 1.0),
        beta_fast=fields.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.positive("rope.scaling.yarn_beta_slow", 1.0),
    )
