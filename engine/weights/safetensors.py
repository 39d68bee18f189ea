"""Tensors of a Hugging Face directory: one safetensors file, or shards named by an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pagemill.engine.errors import ModelLoadError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises ModelLoadError with the reason when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds no JSON object.")
    return value


class SafetensorsFiles:
    """All tensors of a directory by name. Data are mapped, and read when asked for."""

    mapped = True

    def __init__(self, directory: Path) -> None:
        self.files = _weight_files(directory)
        self._where: dict[str, Any] = {}
        for path in self.files:
            handle = _open(path)
            for name in handle.keys():  # noqa: SIM118 - a file handle, not a dict
                if name in self._where:
                    raise ModelLoadError(f"{path} holds tensor {name} which another shard holds too.")
                self._where[name] = handle
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(handle.get_slice(name).get_shape()) for name, handle in self._where.items()
        }

    def read(self, name: str) -> Tensor:
        """The tensor as stored; it may be a view of the mapped file."""
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ModelLoadError(f"{index} has no weight_map.")
        names = sorted(set(shards.values()))
        # A shard is a file of this directory, whatever the index says.
        if outside := [name for name in names if Path(name).name != name]:
            raise ModelLoadError(f"{index} names the shard {outside[0]}, which is not a plain file name.")
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            raise ModelLoadError(
                f"{directory} lacks {len(missing)} of {len(names)} shards, first {missing[0]}."
            )
        return [directory / name for name in names]
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    if len(others) == 1:
        return [directory / others[0]]
    pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pt*"))
    hint = " (pickled weights are not read: convert them to safetensors)" if pickled else ""
    raise ModelLoadError(f"{directory} holds neither {SINGLE} nor {INDEX}{hint}.")


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is damaged or not a safetensors file: {error}.") from error
