"""From a path to a decoder with its weights: recognise, translate, account for every tensor.

May not know requests, schedules or memory for keys and values.
"""

from __future__ import annotations

import hashlib
import logging
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
from pagemill.engine.models.fallback import Fallback, FallbackSpec
from pagemill.engine.models.family import Family
from pagemill.engine.models.registry import family_of_config, family_of_gguf
from pagemill.engine.models.rope_fields import ROPE_TENSORS
from pagemill.engine.models.spec import DecoderSpec
from pagemill.engine.weights.fallback import fallback_spec, load_fallback
from pagemill.engine.weights.gguf import GGUFFile
from pagemill.engine.weights.safetensors import SafetensorsFiles, read_json
from pagemill.kernels import attention_cpu
from pagemill.kernels.choice import takes_compiled
from pagemill.kernels.linear import InvariantLinear, Linear, MakeDense
from pagemill.kernels.linear_fp8 import Fp8Linear
from pagemill.kernels.linear_int8 import Int8Linear
from pagemill.kernels.linear_invariant import FixedTileLinear

log = logging.getLogger(__name__)

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

    family: None where transformers computes the model, and spec is a FallbackSpec.
    name_of: our weight name to the file's. restore: gives a tensor, by our name, the form that it has in
        transformers. ignored: by the file's name, whether a tensor belongs to something else than the text.
    generation: the model's generation_config, {} where it has none.
    """

    path: Path
    family: Family | None
    spec: DecoderSpec | FallbackSpec
    files: TensorFiles
    name_of: Callable[[str], str]
    restore: Callable[[str, Tensor], Tensor]
    ignored: Callable[[str], bool]
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
    # Before weights are looked for, so that what cannot be run says so whatever else is wrong.
    family, spec = _recognised(path, config)
    generation_path = path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    eos = _ids(generation.get("eos_token_id")) | _ids(config.get("eos_token_id"))
    files = SafetensorsFiles(path)
    return Checkpoint(
        path,
        family,
        spec,
        files,
        lambda name: family.safetensors_name(name, files.shapes) if family else name,
        lambda name, tensor: tensor,
        lambda name: family is not None and family.other_part(name),
        generation,
        eos,
    )


def _recognised(path: Path, config: Mapping[str, Any]) -> tuple[Family | None, DecoderSpec | FallbackSpec]:
    """The family, and how the model is computed.

    A flag that a family does not compute leaves transformers' own code to try; where that cannot either, the
    family's reason is the better one.
    """
    family = family_of_config(config)
    if family is None:
        return None, fallback_spec(path, config)
    try:
        return family, family.spec_from_config(config)
    except ModelLoadError as refusal:
        try:
            spec = fallback_spec(path, config)
        except ModelLoadError:
            raise refusal from None
        log.warning("%s runs through the slower code of transformers: %s", path, refusal)
        return None, spec


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile(path)
    family = family_of_gguf(file.metadata)
    spec = family.spec_from_gguf(file.metadata, file.shapes, file.read)
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    eos = frozenset[int]().union(*(_ids(file.metadata.get(f"tokenizer.ggml.{key}")) for key in keys))
    return Checkpoint(
        path,
        family,
        spec,
        file,
        family.gguf_name,
        lambda name, tensor: family.gguf_restore(name, tensor, spec),
        lambda name: False,
        {},
        eos,
    )


def _ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def check_deterministic(checkpoint: Checkpoint, dtype: torch.dtype, on_card: bool = False) -> None:
    """Raises ModelLoadError where a row's bits cannot be kept apart from its neighbours'."""
    reason = attention_cpu.refusal(checkpoint.spec.head_dim, dtype)
    if on_card:
        reason = None  # layers and attention in Triton take any dtype of a card
    if checkpoint.family is None:
        reason = f"{checkpoint.spec.architecture} runs through the code of transformers"
    if reason is not None:
        raise ModelLoadError(f"deterministic cannot be promised, since {reason}: leave it out.")


def check_quantization(checkpoint: Checkpoint, quantization: str | None) -> None:
    """Raises ModelLoadError where the model can't be computed in it."""
    if quantization and checkpoint.family is None:
        raise ModelLoadError(
            f"quantization {quantization} needs a family of our own, and {checkpoint.path} runs through "
            "transformers: leave it out."
        )


def load_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    deterministic: bool = False,
) -> Decoder | Fallback:
    """Reads every weight; whatever is wrong with one is a ModelLoadError that names it."""
    check_quantization(checkpoint, quantization)
    if deterministic:
        check_deterministic(checkpoint, dtype, not takes_compiled(torch.empty(0, device=device)))
    if isinstance(checkpoint.spec, FallbackSpec):
        return load_fallback(checkpoint.path, checkpoint.spec, dtype, device)
    return load_decoder(checkpoint, dtype, device, quantization, deterministic)


def load_decoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    deterministic: bool = False,
) -> Decoder:
    """Reads every weight. One that is missing, misshapen or left over is a ModelLoadError that names it."""
    spec, shapes = checkpoint.spec, checkpoint.files.shapes
    assert isinstance(spec, DecoderSpec), "what transformers computes has a loader of its own"
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
        tensor = checkpoint.restore(name, tensor)
        return tensor.to(device=device, dtype=dtype, copy=checkpoint.files.mapped)

    make_dense: MakeDense = Linear
    if deterministic:
        make_dense = InvariantLinear if takes_compiled(torch.empty(0, device=device)) else FixedTileLinear
    if quantization == "int8":
        make_dense = Int8Linear  # exact integers: a row's own whatever is beside it
    elif quantization == "fp8":
        make_dense = Fp8Linear
    decoder = Decoder(spec, take, lambda name: checkpoint.name_of(name) in shapes, make_dense)
    left = sorted(name for name in shapes.keys() - taken if not _ignorable(name, checkpoint, spec))
    if left:
        raise ModelLoadError(
            f"{checkpoint.path} holds {len(left)} tensors that its config gives no use for, first {left[0]}."
        )
    return decoder


def _ignorable(name: str, checkpoint: Checkpoint, spec: DecoderSpec) -> bool:
    if checkpoint.ignored(name) or DERIVED.search(name):
        return True
    return name in ROPE_TENSORS and bool(spec.rope.divisors)


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
