"""Engines on the device that is checked, or on the rehearsal's, and folders that they are built from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from gpu_check.setting import Setting
from pagemill.engine import EngineConfig
from pagemill.engine.engine import Engine, build_engine
from pagemill.engine.models.decoder import Decoder
from pagemill.engine.models.registry import family_of_config
from pagemill.engine.models.spec import DecoderSpec
from pagemill.engine.request import Completion, Request, SamplingParams
from pagemill.engine.run.simulated_card import SimulatedCard
from pagemill.engine.weights.load import Checkpoint
from pagemill.kernels.choice import triton_everywhere

# What a rehearsal's models have in place of their own sizes.
TINY: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@contextmanager
def on_card(
    setting: Setting, path: Path, checkpoint: Checkpoint | None = None, **options: Any
) -> Iterator[Engine]:
    """An engine on the CUDA device; in a rehearsal on one that is made of tensors of the CPU, where every
    operation takes its form in Triton."""
    if setting.device.type == "cuda":
        config = EngineConfig(model=str(path), device="cuda", **options)
        yield build_engine(config, checkpoint=checkpoint)
        return
    with triton_everywhere():
        config = EngineConfig(model=str(path), **options)
        yield build_engine(config, card=SimulatedCard(), checkpoint=checkpoint)


def on_cpu(path: Path, **options: Any) -> Engine:
    return build_engine(EngineConfig(model=str(path), device="cpu", **options))


def greedy(name: str, prompt: Sequence[int], count: int) -> Request:
    """A row of exactly so many tokens."""
    return Request(name, tuple(prompt), SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True))


def answers(engine: Engine, rows: Sequence[Request]) -> dict[str, Completion]:
    found = {completion.request_id: completion for completion in engine.run(rows)}
    for completion in found.values():
        if completion.error_code is not None:
            raise RuntimeError(f"row {completion.request_id}: {completion.error_message}")
    return found


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A token for each id, as a word."""
    backend = Tokenizer(models.WordLevel({f"t{token}": token for token in range(vocabulary)}, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)


def config_of(config: PreTrainedConfig, architecture: str) -> dict[str, Any]:
    """As it stands in a model's config.json."""
    return json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}


class RandomWeights:
    """Weights of a model that is on no disk, drawn on the device when they are asked for.

    Normal numbers scaled so that activations neither grow nor fade from layer to layer: zeros, or numbers
    that overflow, would be multiplied at another speed."""

    mapped = False

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, random: torch.Generator) -> None:
        self.files: list[Path] = []
        self.shapes: Mapping[str, tuple[int, ...]] = _shapes(spec)
        self._dtype, self._random = dtype, random

    def read(self, name: str) -> Tensor:
        shape, device = self.shapes[name], self._random.device
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=device)
        numbers = torch.randn(shape, dtype=self._dtype, device=device, generator=self._random)
        return numbers.mul_(shape[1] ** -0.5)


def _shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """What a decoder asks for, found by making one without memory."""
    asked: dict[str, tuple[int, ...]] = {}

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        asked[name] = shape
        return torch.empty(shape, device="meta")

    Decoder(spec, take, lambda name: not (spec.tied and name == "lm_head.weight"))
    return asked


def random_model(
    config: Mapping[str, Any], dtype: torch.dtype, random: torch.Generator, folder: Path
) -> Checkpoint:
    """Random weights, and in the folder what else an engine needs. All but where the numbers come from is
    what happens to any model."""
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, int(config["vocab_size"]))
    family = family_of_config(config)
    if family is None:
        raise ValueError(f"{config['architectures']} is of no family")
    spec = family.spec_from_config(config)
    files = RandomWeights(spec, dtype, random)
    return Checkpoint(
        folder,
        family,
        spec,
        files,
        lambda name: name,
        lambda name, tensor: tensor,
        lambda name: False,
        {},
        frozenset(),
    )
