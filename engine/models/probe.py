"""Tries a model of transformers without its weights: whether paged attention can stand for its own.

It runs on the device that holds no data, with an attention that notes what it is given. State beside keys
and values, scores with a bias, masks of another kind show there, and are refused with the reason. May not
know files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.fallback import FallbackSpec

PROBE = "pagemill_probe"
# What models hand their attention that changes nothing here: positions are in the keys by then, the window
# is taken from the mask, and there is no dropout.
HARMLESS = frozenset({"dropout", "sliding_window", "position_ids", "logits_to_keep"})
# Far enough from the beginning for any window.
FAR = 1 << 40


@dataclass(slots=True)
class Trial:
    """What the attention of each layer was given: key-value heads, sizes of keys and values; its window."""

    heads: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)


def probe(config: Any, architecture: str, origin: str) -> FallbackSpec:
    """What running the model takes; ModelLoadError says, in half a sentence, why it cannot be run."""
    trial = Trial()
    try:
        with torch.device("meta"), torch.inference_mode():
            model = _try(config, trial)
    except ModelLoadError:
        raise
    except Exception as error:
        # Modelling code fails in any way where it is used otherwise than it expects.
        if isinstance(error, KeyError) and error.args == (PROBE,):
            raise ModelLoadError("its code knows no attention but its own") from error
        raise ModelLoadError(f"it does not run with a packed step ({first_line(error)})") from error
    text = config.get_text_config(decoder=True)
    layers = range(int(text.num_hidden_layers))
    if missing := [i for i in layers if i not in trial.heads]:
        raise ModelLoadError(
            f"{len(missing)} of its {len(layers)} layers do not go through transformers' attention interface"
        )
    if len(sizes := set(trial.heads.values())) != 1:
        raise ModelLoadError("its layers have keys and values of different sizes")
    kv_heads, head_dim, value_dim = sizes.pop()
    return FallbackSpec(
        architecture=architecture,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        hidden_size=model.get_output_embeddings().weight.shape[1],
        num_layers=len(trial.heads),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        context=getattr(text, "max_position_embeddings", None) or 0,
        windows=tuple(trial.windows[i] for i in sorted(trial.windows)),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        origin=origin,
    )


def first_line(error: Exception) -> str:
    """What an error of somebody else's code says, short enough for one sentence."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _try(config: Any, trial: Trial) -> Any:
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    AttentionInterface.register(PROBE, note)
    AttentionMaskInterface.register(PROBE, note_mask)
    # In bfloat16, as mixtures of experts have no other form on the device that holds nothing.
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=PROBE, dtype=torch.bfloat16
    )
    ids = torch.zeros((1, 3), dtype=torch.int64)
    model.eval()(
        input_ids=ids,
        position_ids=torch.arange(3)[None],
        # Of one row, so that nothing has to look whether several are packed.
        attention_mask=torch.ones_like(ids),
        use_cache=False,
        pagemill=trial,
    )
    return model


def note(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    pagemill: Trial | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Stands for `attend` while a model is tried: computes nothing, and refuses what `attend` cannot do."""
    if pagemill is None:
        raise ModelLoadError("its attention is not handed what the model is called with")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or layer in pagemill.heads:
        raise ModelLoadError("its attention does not say, once for each layer, which one it is")
    strange = sorted(k for k, v in others.items() if k not in HARMLESS and v is not None and v is not False)
    if strange or isinstance(scaling, Tensor) or isinstance(softcap, Tensor):
        what = ", ".join(strange) or "a scale for each head"
        raise ModelLoadError(f"its attention takes {what} into account")
    fits = query.shape[3] == key.shape[3] >= value.shape[3]
    if not fits or query.shape[1] % key.shape[1] or value.shape[1] != key.shape[1]:
        raise ModelLoadError("its queries, keys and values do not fit one another")
    if not getattr(module, "is_causal", True):
        raise ModelLoadError("its attention is not causal")
    pagemill.windows[layer] = window_of(getattr(attention_mask, "pagemill_function", None))
    pagemill.heads[layer] = (key.shape[1], key.shape[3], value.shape[3])
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def note_mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], **others: Any) -> Tensor:
    """Stands for a mask while a model is tried: an empty one that knows what it was to be made of."""
    mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool)
    # A function of more than positions is to be called another way.
    mask.pagemill_function = None if others.get("use_vmap") else mask_function  # type: ignore[attr-defined]
    return mask


def window_of(mask_function: Callable[..., Any] | None) -> int | None:
    """How many keys a query sees, its own included, by transformers' function of (row, head, query, key).

    None for all of them. Raises ModelLoadError where it is no window that moves with the query.
    """

    def sees(query: int, back: int) -> bool:
        at = torch.tensor([query, query - back], device="cpu")
        return bool(mask_function(0, 0, at[0], at[1])) if mask_function else False

    def reach(query: int) -> int:
        near, far = 0, FAR // 2
        while far - near > 1:
            middle = (near + far) // 2
            near, far = (middle, far) if sees(query, middle) else (near, middle)
        return near + 1

    queries = (FAR, FAR + 1, FAR + 4099)
    try:
        if mask_function is None or any(sees(q, -1) or not sees(q, 0) for q in queries):
            raise ModelLoadError("its attention is masked in a way of its own")
        if all(sees(q, q) for q in queries):
            return None
        windows = {reach(q) for q in queries}
    except RuntimeError as error:  # it looks at more than two positions
        raise ModelLoadError("its attention is masked in a way of its own") from error
    if len(windows) != 1:
        raise ModelLoadError("its attention sees chunks, not a window that moves")
    return windows.pop()
