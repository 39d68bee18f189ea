"""A decoder's layers as one program give the bits that they give one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import SIZES, save, tiny_model
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from pagemill.engine.cache.storage import KVStorage
from pagemill.engine.models.decoder import Decoder, Inputs
from pagemill.engine.models.program import ROOM
from pagemill.engine.weights.load import load_weights, open_checkpoint
from pagemill.kernels.attention import plan_rows
from pagemill.kernels.choice import triton_everywhere

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "heads of 48, biases": Qwen2Config(**(SIZES | {"head_dim": 48, "hidden_size": 192})),
    "normed queries": Qwen3Config(**SIZES),
    "windows": Qwen3Config(
        **(SIZES | {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1})
    ),
}
KINDS = [("float32", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "int8")]


def decoder(config: Any, path: Path, dtype: str = "float32", quantization: str | None = None) -> Decoder:
    checkpoint = open_checkpoint(str(save(tiny_model(config), path)))
    model = load_weights(checkpoint, getattr(torch, dtype), torch.device("cpu"), quantization)
    assert isinstance(model, Decoder)
    return model


def storage_for(model: Decoder) -> KVStorage:
    spec = model.spec
    sizes = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
    return KVStorage(64, *sizes, model.dtype, torch.device("cpu"))


def step(lengths: list[tuple[int, int]], storage: KVStorage) -> Inputs:
    """Rows of so many new tokens behind so many that are there, each with blocks of its own."""
    tables = [list(range(9 * i, 9 * i + 9)) for i in range(len(lengths))]
    places = [
        (tables[i][p // 16], p % 16, p)
        for i, (before, new) in enumerate(lengths)
        for p in range(before, before + new)
    ]
    blocks, offsets, positions = (torch.tensor(column) for column in zip(*places, strict=True))
    fresh = [block for block, offset, _ in places if offset == 0]
    news, totals = [new for _, new in lengths], [before + new for before, new in lengths]
    rows = plan_rows(news, totals, tables, storage.layer(0))
    ids = torch.randint(0, 211, (len(places),), generator=torch.Generator().manual_seed(len(places)))
    return Inputs(ids, positions, blocks, offsets, torch.tensor(fresh, dtype=torch.int64), rows)


# Prompts, decodes, both; more tokens than the first program has room for, and few again.
STEPS = [
    [(0, 30), (0, 1), (0, 7)],
    [(30, 1), (1, 1), (7, 1)],
    [(31, 1), (2, ROOM), (8, 17)],
    [(32, 1)],
    [(33, 60), (66, 1), (25, 30), (0, 40)],
]


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_program_gives_the_bits_of_its_layers(
    name: str, dtype: str, quantization: str | None, tmp_path: Path
) -> None:
    model = decoder(CONFIGS[name], tmp_path, dtype, quantization)
    assert model.program is not None
    program, plain, ours = model.program, storage_for(model), storage_for(model)
    for lengths in STEPS:
        model.program = None
        expected = model.hidden(step(lengths, plain), plain)
        model.program = program
        got = model.hidden(step(lengths, ours), ours)
        assert torch.equal(got, expected)
        touched = step(lengths, ours).blocks
        assert torch.equal(ours.tensor[touched], plain.tensor[touched])


def test_what_a_step_gave_stays_when_another_is_run(tmp_path: Path) -> None:
    model = decoder(CONFIGS["llama"], tmp_path)
    storage = storage_for(model)
    first = model.hidden(step([(0, 5)], storage), storage)
    kept = first.clone()
    model.hidden(step([(5, 9)], storage), storage)
    assert torch.equal(first, kept)


def test_another_memory_and_another_number_of_threads_are_noticed(tmp_path: Path) -> None:
    model = decoder(CONFIGS["llama"], tmp_path)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            storage = storage_for(model)
            results.append(model.hidden(step([(0, 40), (0, 3)], storage), storage))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    "config",
    [Gemma2Config(**SIZES), Gemma3TextConfig(**SIZES), LlamaConfig(**(SIZES | {"intermediate_size": 100}))],
)
def test_what_is_not_compiled_goes_layer_by_layer(config: Any, tmp_path: Path) -> None:
    model = decoder(config, tmp_path)
    assert model.program is None
    storage = storage_for(model)
    assert model.hidden(step([(0, 20)], storage), storage).isfinite().all()


def test_kernels_for_cards_are_not_passed_by(tmp_path: Path) -> None:
    model = decoder(CONFIGS["llama"], tmp_path)
    assert model.program is not None
    storage = storage_for(model)
    assert model.program.serves(storage)
    with triton_everywhere():
        assert not model.program.serves(storage)
