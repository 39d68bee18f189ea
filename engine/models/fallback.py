"""Any other causal language model of transformers: its own modelling code over our paged attention.

transformers lets a backend register an attention function, and the models hand it what they were called
with. So a step is called packed, one row of tokens with their positions, and the function finds each
row's keys and values in the paged memory.

What a model would do that this does not carry (state beside keys and values, scores with a bias, masks of
another kind) shows when it is tried: without weights, on no device (`probe`), and once more with weights
against its own attention (`verify`). It is refused then, with the reason. May not know requests or
schedules; code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.decoder import Inputs
from pagemill.kernels.attention import paged_attention
from pagemill.kernels.cache_write import write_kv

PAGED, PROBE = "pagemill", "pagemill_probe"
# What models hand their attention that changes nothing here: positions are in the keys by then, the window
# is taken from the mask, and there is no dropout.
HARMLESS = frozenset({"dropout", "sliding_window", "position_ids", "logits_to_keep"})
# The window of a layer that sees all.
ALL = 0
# Far enough from the beginning for any window.
FAR = 1 << 40


@dataclass(frozen=True, slots=True)
class FallbackSpec:
    """What there is to know of a model before its weights are read.

    windows: for each layer how many tokens back it sees, its own included, None for all. value_dim: size of
        a value where it is less than a key's. num_parameters: of the whole model. origin: what its
        arithmetic follows from, its config and the release of transformers.
    """

    architecture: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    context: int
    windows: tuple[int | None, ...]
    num_parameters: int
    origin: str
    rope_switch: int | None = None

    def parameters(self) -> int:
        return self.num_parameters


@dataclass(slots=True)
class Step:
    """What the attention of one pass works on; models pass it through."""

    spec: FallbackSpec
    inputs: Inputs
    storage: KVStorage


@dataclass(slots=True)
class Trial:
    """What the attention of a model that is tried was given: by layer, size of heads and window."""

    heads: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)


class Fallback:
    """A model of transformers in the decoder's place."""

    def __init__(self, spec: FallbackSpec, model: Any) -> None:
        self.spec = spec
        self._model = model
        self._base = getattr(model, model.base_model_prefix)
        # The same model with its body replaced by one that gives what it is told: what transformers does
        # behind the body (scaling, caps, the head) for the rows that sample only.
        self._given = _Given()
        self._head = copy.copy(model)
        self._head._modules = dict(model._modules)
        self._head._modules[model.base_model_prefix] = self._given

    def hidden(self, inputs: Inputs, storage: KVStorage) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm; writes the tokens' keys and values."""
        storage.clear(inputs.fresh_blocks)
        out = self._base(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            pagemill=Step(self.spec, inputs, storage),
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] in float32 of the hidden states of rows that sample."""
        self._given.hidden = hidden[None]
        ids = torch.zeros((1, hidden.shape[0]), dtype=torch.int64)
        logits: Tensor = self._head(input_ids=ids, use_cache=False).logits[0]
        return logits.float()

    def by_itself(self, token_ids: Tensor) -> Tensor:
        """Logits [tokens, vocabulary] in float32 of one text under the model's own attention."""
        self._model.set_attn_implementation("eager")
        try:
            logits: Tensor = self._model(input_ids=token_ids[None], use_cache=False).logits[0]
        finally:
            self._model.set_attn_implementation(PAGED)
        return logits.float()


class _Given(nn.Module):
    hidden: Tensor

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(self.hidden)


class _Output:
    """What a model's body gives: hidden states, by name or in the first place, and nothing else."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, place: int) -> Tensor:
        if place != 0:
            raise IndexError(place)
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        # Models pass on attentions, router logits, caches: of these there are none.
        return None


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    pagemill: Step,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, head_dim], key and value likewise; returns [1, tokens, heads, value_dim]."""
    spec, inputs = pagemill.spec, pagemill.inputs
    layer = pagemill.storage.layer(module.layer_idx)
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if spec.value_dim < spec.head_dim:
        values = F.pad(values, (0, spec.head_dim - spec.value_dim))
    write_kv(layer, keys, values, inputs.blocks, inputs.offsets)
    out = paged_attention(
        query[0].transpose(0, 1),
        layer,
        inputs.rows,
        spec.head_dim**-0.5 if scaling is None else scaling,
        window=spec.windows[module.layer_idx],
        softcap=softcap,
    )
    return out[None, :, :, : spec.value_dim], None


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
    layer = getattr(module, "layer_idx", None)
    if pagemill is None or not isinstance(layer, int) or layer in pagemill.heads:
        raise ModelLoadError("its attention does not say, once for each layer, which one it is")
    strange = sorted(k for k, v in others.items() if k not in HARMLESS and v is not None and v is not False)
    if strange or isinstance(scaling, Tensor) or isinstance(softcap, Tensor):
        what = ", ".join(strange) or "a scale for each head"
        raise ModelLoadError(f"its attention takes {what} into account")
    window = getattr(attention_mask, "pagemill_window", None)
    if window is None or not getattr(module, "is_causal", True):
        raise ModelLoadError("its attention is masked in a way of its own")
    pagemill.windows[layer] = None if window == ALL else window
    pagemill.heads[layer] = (key.shape[1], key.shape[3], value.shape[3])
    fits = query.shape[3] == key.shape[3] >= value.shape[3]
    if not fits or query.shape[1] % key.shape[1] or value.shape[1] != key.shape[1]:
        raise ModelLoadError("its queries, keys and values do not fit one another")
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def note_mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], **others: Any) -> Tensor:
    """Stands for a mask while a model is tried: an empty one that says which window it has."""
    if others.get("use_vmap"):
        raise ModelLoadError("its attention is masked in a way of its own")
    mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    try:
        mask.pagemill_window = window_of(mask_function)  # type: ignore[attr-defined]
    except RuntimeError as error:  # it looks at more than two positions
        raise ModelLoadError("its attention is masked in a way of its own") from error
    return mask


def window_of(mask_function: Callable[..., Any]) -> int:
    """How many keys a query sees, its own included, by transformers' function of (row, head, query, key).

    ALL for all of them. Raises ModelLoadError where it is no window that moves with the query.
    """

    def sees(query: int, back: int) -> bool:
        at = torch.tensor([query, query - back], device="cpu")
        return bool(mask_function(0, 0, at[0], at[1]))

    def reach(query: int) -> int:
        near, far = 0, FAR // 2
        while far - near > 1:
            middle = (near + far) // 2
            near, far = (middle, far) if sees(query, middle) else (near, middle)
        return near + 1

    queries = (FAR, FAR + 1, FAR + 4099)
    if any(sees(q, -1) or not sees(q, 0) for q in queries):
        raise ModelLoadError("its attention is not causal")
    if all(sees(q, q) for q in queries):
        return ALL
    windows = {reach(q) for q in queries}
    if len(windows) != 1:
        raise ModelLoadError("its attention sees chunks, not a window that moves")
    return windows.pop()


def first_line(error: Exception) -> str:
    """What an error of somebody else's code says, short enough for one sentence."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def register() -> None:
    """Makes the attention known to transformers; again and again is the same as once."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PAGED, attend)
    AttentionInterface.register(PROBE, note)
    AttentionMaskInterface.register(PROBE, note_mask)


def probe(config: Any, architecture: str, context: int, origin: str) -> FallbackSpec:
    """Tries a model without weights; ModelLoadError says what about it cannot be run."""
    from transformers import AutoModelForCausalLM

    register()
    trial = Trial()
    try:
        # In bfloat16, as mixtures of experts have no other form on this device.
        with torch.device("meta"), torch.inference_mode():
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=PROBE, dtype=torch.bfloat16
            )
            ids = torch.zeros((1, 3), dtype=torch.int64)
            model.eval()(
                input_ids=ids,
                position_ids=torch.arange(3)[None],
                # Of one row: nothing has to look whether several are packed.
                attention_mask=torch.ones_like(ids),
                use_cache=False,
                pagemill=trial,
            )
    except ModelLoadError:
        raise
    except Exception as error:
        # Modelling code fails in any way where it is used otherwise than it expects.
        raise ModelLoadError(f"it does not run with a packed step ({first_line(error)})") from error
    layers = range(int(config.get_text_config(decoder=True).num_hidden_layers))
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
        num_layers=len(trial.heads),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        context=context,
        windows=tuple(trial.windows[i] for i in sorted(trial.windows)),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        origin=origin,
    )
