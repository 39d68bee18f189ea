"""How a model would be run with given settings, without reading its weights.

What `load_model` decides, decided beforehand: family or fallback, dtype, sizes, whether it fits here. It
takes no memory. What only the weights show can still refuse a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pagemill.engine.config import BLOCK_SIZE, EngineConfig
from pagemill.engine.errors import EngineError
from pagemill.engine.models.registry import Description, describe
from pagemill.engine.run.available import available_memory
from pagemill.engine.run.card_load import fit_limits, most_blocks, usable_bytes
from pagemill.engine.run.device import check_eight_bits, choose_card, resolve_dtype
from pagemill.engine.run.memory import bytes_of_block, plan_memory, step_bytes, weight_bytes
from pagemill.engine.tokenizer import Tokenizer
from pagemill.engine.weights.load import Checkpoint, check_deterministic, check_quantization, open_checkpoint


@dataclass(frozen=True, slots=True)
class Sizes:
    """parameters: numbers in the model's files. weight_bytes: of them once loaded. kv_token_bytes: what a
    token of a text takes in key-value memory. step_bytes: what a full step takes beside. available_bytes:
    free now, None where that cannot be known. own_context: the model's, whatever fits.
    """

    parameters: int
    file_bytes: int
    weight_bytes: int
    kv_token_bytes: int
    step_bytes: int
    available_bytes: int | None
    own_context: int


@dataclass(frozen=True, slots=True)
class Preview:
    """reason: why it is refused or does not fit; None where it runs.

    context: most tokens of a row, kv_tokens: tokens of key-value memory; None where it does not fit.
    chat_template: None where its tokenizer was not looked at.
    """

    found: Description
    runs: bool
    dtype: str
    quantization: str | None
    sizes: Sizes | None = None
    context: int | None = None
    kv_tokens: int | None = None
    chat_template: bool | None = None
    reason: str | None = None


def preview(config: EngineConfig) -> Preview:
    """Looks at the files of `config.model`; takes seconds for a model without a family, less for others."""
    card = choose_card(config.device)
    dtype = resolve_dtype(config.dtype, card)
    check_eight_bits(config, card)
    name = str(dtype).removeprefix("torch.")
    found = describe(config.model)
    if found.how == "refused":
        return Preview(found, False, name, config.quantization, reason=found.reason)
    checkpoint = open_checkpoint(config.model)
    spec = checkpoint.spec
    weights = weight_bytes(spec, dtype, config)
    if card is None:
        free, most = available_memory(), None
    else:
        free = usable_bytes(card)
        config = fit_limits(spec, dtype, config, free - weights)
        most = most_blocks(spec, config)
    context = kv_tokens = reason = None
    template = None
    try:
        check_quantization(checkpoint, config.quantization)
        if config.deterministic:
            check_deterministic(checkpoint, dtype, card is not None)
        template = Tokenizer.from_path(config.model).has_chat_template
        plan = plan_memory(spec, dtype, config, free, weights=weights, most_blocks=most)
        context, kv_tokens = plan.context, plan.kv_tokens
    except EngineError as error:
        reason = str(error)
    sizes = Sizes(
        parameters=_parameters(checkpoint),
        file_bytes=sum(Path(file).stat().st_size for file in checkpoint.files.files),
        weight_bytes=weights,
        kv_token_bytes=bytes_of_block(spec, dtype, config) // BLOCK_SIZE,
        step_bytes=step_bytes(spec, dtype, config),
        available_bytes=free,
        own_context=spec.context,
    )
    return Preview(
        found, reason is None, name, config.quantization, sizes, context, kv_tokens, template, reason
    )


def _parameters(checkpoint: Checkpoint) -> int:
    shapes = checkpoint.files.shapes
    return sum(math.prod(shape) for name, shape in shapes.items() if not checkpoint.ignored(name))
