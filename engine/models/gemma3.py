"""Gemma 3, text: Gemma 2 with normalised queries and keys, and five windowed layers to one that sees all.

The two kinds of layers turn by different rotary embeddings; scaling applies to those that see all. Of
checkpoints that also see images the text part is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models import dense, gemma2
from pagemill.engine.models.family import Family, Read, Shapes
from pagemill.engine.models.fields import Fields
from pagemill.engine.models.rope_fields import scaled
from pagemill.engine.models.spec import DecoderSpec, RopeSpec

ARCHITECTURE = "Gemma3ForCausalLM"
WITH_IMAGES = "Gemma3ForConditionalGeneration"
DEFAULTS = {
    **gemma2.DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
PERIOD = 6
LARGEST = 62


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    text = config.get("text_config")
    fields = dense.config_fields(text if isinstance(text, Mapping) else config, DEFAULTS)
    # It is in the config class, and transformers does not compute it.
    fields.must_equal("attn_logit_softcapping", None, None)
    rope, window_rope = _ropes(fields)
    spec = gemma2.gemma_flags(fields, dense.from_config(fields, ARCHITECTURE, lambda *_: rope))
    period = fields.integer("sliding_window_pattern", PERIOD)
    windows = dense.windows_from_config(
        fields, spec.num_layers, fields.optional_integer("sliding_window"), lambda i: (i + 1) % period != 0
    )
    return dense.check(replace(spec, qk_norm=True, windows=windows, window_rope=window_rope))


def _ropes(fields: Fields) -> tuple[RopeSpec, RopeSpec]:
    """transformers 5 nests `rope_parameters` by kind of layer; before, there were two bases and a scaling."""
    both = fields.section("rope_parameters") or Fields({}, fields.source)
    full, local = both.section("full_attention"), both.section("sliding_attention")
    if both.values and full is None and local is None:
        raise ModelLoadError(f"{both.source} is not by kind of layer, as Gemma 3's must be.")
    scaling = fields.section("rope_scaling")
    return (
        _rope(scaling or full or fields, full, fields.positive("rope_theta", GLOBAL_THETA)),
        _rope(local or fields, local, fields.positive("rope_local_base_freq", LOCAL_THETA)),
    )


def _rope(scaling: Fields, base: Fields | None, theta: float) -> RopeSpec:
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ("default", "linear"):
        raise ModelLoadError(
            f"{scaling.source}: the rope scaling is {kind!r}; of Gemma 3 this version computes default and "
            "linear only."
        )
    return scaled(scaling, kind, base.positive("rope_theta", theta) if base else theta, (0, 0))


def spec_from_gguf(metadata: Mapping[str, Any], shapes: Shapes, read: Read) -> DecoderSpec:
    fields = dense.gguf_fields(metadata, "gemma3")
    spec = gemma2.gemma_arithmetic(dense.from_gguf(fields, ARCHITECTURE, shapes, read))
    windows = dense.windows_from_gguf(fields, spec.num_layers, PERIOD)
    return dense.check(
        replace(
            spec,
            qk_norm=True,
            attention_scale=gemma2.scale_from_gguf(fields, spec, LARGEST),
            final_softcap=fields.optional_number("final_logit_softcapping"),
            windows=windows,
            window_rope=RopeSpec(fields.positive("rope.freq_base_swa", LOCAL_THETA)) if windows else None,
        )
    )


FAMILY = Family(
    name="gemma3",
    covers="Gemma 3: text models, and the text part of those with images",
    architectures=(ARCHITECTURE, WITH_IMAGES),
    gguf_architectures=("gemma3",),
    spec_from_config=spec_from_config,
    spec_from_gguf=spec_from_gguf,
    gguf_names=gemma2.GGUF_NAMES,
    gguf_restore=gemma2.gguf_restore,
    text_prefixes=("model.language_model.", "language_model."),
    other_parts=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)
