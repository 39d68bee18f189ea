"""A GGUF file: its metadata, and its tensors dequantised by the `gguf` package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagemill.engine.errors import ModelLoadError


class GGUFFile:
    """metadata: every key with its value as plain Python. Tensors are mapped, and read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [path]
        reader = _open(path)
        try:
            self.metadata: Mapping[str, Any] = {key: f.contents() for key, f in reader.fields.items()}
        except (ValueError, IndexError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{path} has damaged metadata: {error}.") from error
        if self.metadata.get("split.count", 1) > 1:
            raise ModelLoadError(f"{path} is one part of a split GGUF; join the parts with llama-gguf-split.")
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        # GGUF counts dimensions from the innermost one.
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """The tensor in float32, dequantised where needed."""
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.path}: tensor {name} is {tensor.tensor_type.name}, which cannot be dequantised."
            ) from error
        result = torch.from_numpy(values).reshape(self.shapes[name]).to(torch.float32)
        # float32 tensors come as views of the mapped, read-only file.
        return result.clone() if values.base is not None else result


def _open(path: Path) -> Any:
    from gguf import GGUFReader

    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelLoadError(f"{path} is not a GGUF file.")
        return GGUFReader(path)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} is damaged or cut short: {error}.") from error
