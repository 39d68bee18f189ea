"""Any other causal language model of transformers: its own modelling code over our paged attention.

transformers lets a backend register an attention function, and the models hand it what they were called
with. So a step is called packed, one row of tokens with their positions, and the function finds each
row's keys and values in the paged memory. What a model would do that this does not carry is refused:
probe.py tries it without weights, run/trial.py once more with them.

May not know requests or schedules; code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.models.decoder import Inputs
from pagemill.kernels.attention import paged_attention
from pagemill.kernels.cache_write import write_kv, write_scaled_kv

# Our attention's name in transformers.
PAGED = "pagemill"


@dataclass(frozen=True, slots=True)
class FallbackSpec:
    """What there is to know of a model before its weights are read.

    value_dim: size of a value where it is less than a key's. context: most positions, 0 where the config
        does not say. windows: for each layer how many tokens back it sees, its own included, None for all.
    num_parameters: of the whole model. origin: what its arithmetic follows from, its config and the release
        of transformers.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
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


def register() -> None:
    """Makes our attention known to transformers; again and again is the same as once."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, attend)


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
    scales = pagemill.storage.layer_scales(module.layer_idx)
    if scales is None:
        write_kv(layer, keys, values, inputs.blocks, inputs.offsets)
    else:
        write_scaled_kv(layer, scales, keys, values, inputs.blocks, inputs.offsets)
    out = paged_attention(
        query[0].transpose(0, 1),
        layer,
        inputs.rows,
        spec.head_dim**-0.5 if scaling is None else scaling,
        window=spec.windows[module.layer_idx],
        softcap=softcap,
        scales=scales,
    )
    return out[None, :, :, : spec.value_dim], None


class Fallback:
    """A model of transformers in the decoder's place."""

    def __init__(self, spec: FallbackSpec, model: Any) -> None:
        self.spec = spec
        self._model = model
        self._body = model.get_decoder()
        # The same model with its body replaced by one that gives what it is told: what transformers does
        # behind the body (scaling, caps, the head) for the rows that sample only.
        self._given = _Given()
        path = next(name for name, module in model.named_modules() if module is self._body)
        self._head = _replaced(model, path.split("."), self._given)

    def hidden(self, inputs: Inputs, storage: KVStorage) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm; writes the tokens' keys and values."""
        storage.clear(inputs.fresh_blocks)
        out = self._body(
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
        ids = torch.zeros((1, hidden.shape[0]), dtype=torch.int64, device=hidden.device)
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


def _replaced(module: Any, path: list[str], part: nn.Module) -> Any:
    """A module like this one, and of its parts, but for the one at `path`."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    first, *rest = path
    twin._modules[first] = _replaced(module._modules[first], rest, part) if rest else part
    return twin


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
