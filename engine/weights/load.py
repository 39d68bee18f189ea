"""From a path to a decoder with its weights: recognise, translate, account for every tensor.

May not know requests, schedules or memory for keys and values.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.decoder import Decoder
from pagemill.engine.models.registry import Family, family_of_config, family_of_gguf
from pagemill.engine.models.spec import DecoderSpec
from pagemill.engine.weights.gguf import GGUFFile
from pagemill.engine.weights.safetensors import SafetensorsFiles, read_json
from pagemill.kernels.linear import Linear
from pagemill.kernels.linear_int8 import Int8Linear

# Tensors that older converters left in checkpoints and that are computed, not read.
DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")

# Of each weight file the digest reads its size, this much from either end and this many samples between: a
# few megabytes of any model, so that two files are told apart by header, size and values at small cost.
DIGEST_ENDS = 1 << 20
DIGEST_SAMPLES = 64
DIGEST_SAMPLE_BYTES = 1 << 16


class TensorFiles(Protocol):
    """Where tensors come from, by the names they have there.

    mapped: whether `read` gives views of the file, which change, or fault, when it does.
    """

    mapped: bool
    files: list[Path]
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk, recognised but not read.

    name_of: our weight name to the file's. interleaved_heads: see Family.gguf_interleaved_heads.
    generation: the model's generation_config, {} where it has none.
    """

    path: Path
    spec: DecoderSpec
    files: TensorFiles
    name_of: Callable[[str], str]
    interleaved_heads: Callable[[str], int]
    generation: Mapping[str, Any]
    eos_token_ids: frozenset[int]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Recognises a directory of safetensors or a GGUF file; raises ModelLoadError with the reason."""
    path = Path(path)
    if path.is_dir():
        return _open_directory(path)
    if path.is_file():
        return _open_gguf(path)
    raise ModelLoadError(f"There is no model at {path}.")


def _open_directory(path: Path) -> Checkpoint:
    if not (path / "config.json").exists():
        raise ModelLoadError(f"{path} holds no config.json.")
    config = read_json(path / "config.json")
    family = family_of_config(config)
    spec = family.spec_from_config(config)
    generation_path = path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    eos = _ids(generation.get("eos_token_id")) | _ids(config.get("eos_token_id"))
    files = SafetensorsFiles(path)
    return Checkpoint(path, spec, files, lambda name: name, lambda name: 0, generation, eos)


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile(path)
    family: Family = family_of_gguf(file.metadata)
    spec = family.spec_from_gguf(file.metadata, file.shapes, file.read)
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    eos = frozenset[int]().union(*(_ids(file.metadata.get(f"tokenizer.ggml.{key}")) for key in keys))
    return Checkpoint(
        path,
        spec,
        file,
        family.gguf_name,
        lambda name: family.gguf_interleaved_heads(name, spec),
        {},
        eos,
    )


def _ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def load_decoder(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quantization: str | None = None
) -> Decoder:
    """Reads every weight. One that is missing, misshapen or left over is a ModelLoadError that names it."""
    shapes = checkpoint.files.shapes
    taken: set[str] = set()

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        source = checkpoint.name_of(name)
        if source not in shapes:
            raise ModelLoadError(f"{checkpoint.path} lacks the tensor {source}.")
        if shapes[source] != shape:
            raise ModelLoadError(
                f"{checkpoint.path}: tensor {source} has shape {list(shapes[source])}, not {list(shape)}."
            )
        taken.add(source)
        tensor = checkpoint.files.read(source)
        if not tensor.is_floating_point():
            raise ModelLoadError(f"{checkpoint.path}: tensor {source} holds {tensor.dtype}, not numbers.")
        if heads := checkpoint.interleaved_heads(name):
            tensor = _deinterleave(tensor, heads)
        return tensor.to(device=device, dtype=dtype, copy=checkpoint.files.mapped)

    decoder = Decoder(
        checkpoint.spec,
        take,
        lambda name: checkpoint.name_of(name) in shapes,
        Int8Linear if quantization == "int8" else Linear,
    )
    left = sorted(name for name in shapes if name not in taken and not _ignorable(name, checkpoint.spec))
    if left:
        raise ModelLoadError(
            f"{checkpoint.path} holds {len(left)} tensors that its config gives no use for, first {left[0]}."
        )
    return decoder


def _ignorable(name: str, spec: DecoderSpec) -> bool:
    return bool(DERIVED.search(name)) or (name == "rope_freqs.weight" and bool(spec.rope.divisors))


def _deinterleave(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from (0, d/2, 1, d/2 + 1, ...) back to (0, 1, 2, ...)."""
    per_head = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return per_head.transpose(1, 2).reshape(weight.shape)


def weights_digest(files: list[Path]) -> str:
    """A hex digest over names-independent content samples of the weight files, in order."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            digest.update(file.read(DIGEST_ENDS))
            for i in range(DIGEST_SAMPLES):
                file.seek(size * i // DIGEST_SAMPLES)
                digest.update(file.read(DIGEST_SAMPLE_BYTES))
            file.seek(max(0, size - DIGEST_ENDS), os.SEEK_SET)
            digest.update(file.read(DIGEST_ENDS))
    return digest.hexdigest()
