"""Tries a model of transformers before it serves: packed steps over paged memory against its own attention.

What a model keeps beside keys and values, or adds to its scores, would not fail: it would answer wrongly.
It shows in the logits of two short texts that run side by side, in chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill.engine.batch import Batch
from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.config import BLOCK_SIZE
from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.fallback import Fallback
from pagemill.engine.models.probe import first_line
from pagemill.engine.request import Request, SamplingParams
from pagemill.engine.run.rows import build_rows
from pagemill.engine.sequence import Sequence

# Tokens of the two texts in each step: beginnings together, a chunk beside a decode, one alone.
STEPS = ((9, 4), (17, 1), (1, 12), (0, 7))
# Largest error allowed, in standard deviations of the logits; roundings of sixteen bits add up over layers.
ALLOWED = {torch.float32: 1e-3}
ALLOWED_HALF = 0.25


@torch.inference_mode()
def check_fallback(model: Fallback, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ModelLoadError when the model computes something else through our attention than by itself."""
    texts = [_text(row, model.spec.vocab_size) for row in (0, 1)]
    try:
        found = _packed(model, texts, dtype, device)
        expected = [model.by_itself(torch.tensor(text, device=device)) for text in texts]
    except Exception as error:
        # Modelling code fails in any way where it is used otherwise than it expects.
        raise ModelLoadError(
            f"{model.spec.architecture} does not run with packed steps ({first_line(error)})."
        ) from error
    for own, ours in zip(expected, found, strict=True):
        error_size = float((ours - own).abs().max() / own.std())
        if not error_size <= ALLOWED.get(dtype, ALLOWED_HALF):
            raise ModelLoadError(
                f"{model.spec.architecture} gives other logits over paged attention than by itself (off by "
                f"{error_size:.2g} standard deviations): it keeps or adds something that this does not carry."
            )


def _text(row: int, vocabulary: int) -> list[int]:
    return [(7 + 13 * row + 31 * i) % vocabulary for i in range(sum(step[row] for step in STEPS))]


def _packed(
    model: Fallback, texts: list[list[int]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Logits of every token of each text."""
    spec = model.spec
    blocks = [-(-len(text) // BLOCK_SIZE) for text in texts]
    storage = KVStorage(sum(blocks), spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, device)
    rows = [Sequence.of(Request(str(i), tuple(text), SamplingParams(1)), i) for i, text in enumerate(texts)]
    rows[0].block_table, rows[1].block_table = list(range(blocks[0])), list(range(blocks[0], sum(blocks)))
    parts: list[list[Tensor]] = [[], []]
    for step in STEPS:
        chosen = [i for i in (0, 1) if step[i]]
        batch = Batch(tuple(rows[i] for i in chosen), tuple(step[i] for i in chosen))
        logits = model.logits(model.hidden(build_rows(batch, storage).inputs, storage))
        for i, part in zip(chosen, torch.split(logits, [step[i] for i in chosen]), strict=True):
            parts[i].append(part)
            rows[i].num_computed_tokens += step[i]
    return [torch.cat(part) for part in parts]
