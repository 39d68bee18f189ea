"""A GGUF file: its metadata, and its tensors dequantised by the `gguf` package.

The header is read here rather than by the package's reader, which takes seconds for a vocabulary (it makes
an array of every string) and reads past the end of a truncated file without a word.
Format: github.com/ggml-org/ggml, docs/gguf.md; versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagemill.engine.errors import ModelLoadError

# Value types by number: struct format of the fixed ones, then the two that have a length.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
_VALUES_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """shape: outermost dimension first. kind: a `gguf.GGMLQuantizationType`. start: offset in the file."""

    shape: tuple[int, ...]
    kind: Any
    start: int
    size: int


class GGUFFile:
    """metadata: every key with its value as plain Python. Tensors are mapped, and read when asked for."""

    mapped = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [path]
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}.") from error
        except ValueError as error:  # an empty file cannot be mapped
            raise ModelLoadError(f"{path} is empty.") from error
        if self._data[:4] != b"GGUF":
            raise ModelLoadError(f"{path} is not a GGUF file.")
        try:
            header = _Header(self._data)
            self.metadata: Mapping[str, Any] = header.metadata()
            self._tensors = header.tensors(self.metadata)
        except (ValueError, struct.error, OverflowError, TypeError, RecursionError) as error:
            raise ModelLoadError(f"{path} is damaged or cut short: {error}.") from error
        if self.metadata.get("split.count", 0) not in (0, 1):
            raise ModelLoadError(f"{path} is one part of a split GGUF; join the parts with llama-gguf-split.")
        self.shapes: Mapping[str, tuple[int, ...]] = {name: t.shape for name, t in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """The tensor in float32, dequantised where needed; a copy."""
        tensor = self._tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.size, tensor.start)
        plain = _PLAIN.get(tensor.kind.name)
        try:
            # The copy lets torch own, and write to, what it gets.
            values = raw.view(plain).astype(np.float32) if plain else _dequantize(raw, tensor.kind)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.path}: tensor {name} is {tensor.kind.name}, which cannot be dequantised."
            ) from error
        return torch.from_numpy(values).reshape(tensor.shape)


def _dequantize(raw: np.ndarray[Any, np.dtype[np.uint8]], kind: Any) -> np.ndarray[Any, Any]:
    """A megabyte at a time: the package goes by 16 rows, which for narrow matrices is mostly overhead."""
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    values_in_block, bytes_in_block = GGML_QUANT_SIZES[kind]
    values = np.empty(raw.size // bytes_in_block * values_in_block, np.float32)
    blocks = max(1, _VALUES_AT_ONCE // values_in_block)
    for start in range(0, raw.size // bytes_in_block, blocks):
        piece = raw[start * bytes_in_block : (start + blocks) * bytes_in_block]
        first = start * values_in_block
        values[first : first + blocks * values_in_block] = dequantize(piece.reshape(1, -1), kind)[0]
    return values


class _Header:
    """Reads a header front to back; struct.error and ValueError say that it ends too soon or is no sense."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            hint = " (or it is big-endian)" if version & 0xFFFF == 0 else ""
            raise ValueError(f"version {version} is not known{hint}")
        self._num_tensors = self._scalar("Q")
        self._num_keys = self._scalar("Q")

    def metadata(self) -> dict[str, Any]:
        values = {}
        for _ in range(self._num_keys):
            key = self._text()
            values[key] = self._value(self._scalar("I"))
        return values

    def tensors(self, metadata: Mapping[str, Any]) -> dict[str, StoredTensor]:
        """To be called after `metadata`."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        entries = [self._tensor_entry() for _ in range(self._num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"alignment {alignment!r}")
        base = -(-self._at // alignment) * alignment
        found: dict[str, StoredTensor] = {}
        for name, shape, number, offset in entries:
            kind = GGMLQuantizationType(number)
            values_in_block, bytes_in_block = GGML_QUANT_SIZES[kind]
            count = math.prod(shape)
            if not shape or shape[-1] % values_in_block:
                raise ValueError(f"tensor {name} has shape {list(shape)}, not whole blocks of {kind.name}")
            size = count // values_in_block * bytes_in_block
            if base + offset + size > len(self._data):
                raise ValueError(f"tensor {name} lies behind the end of the file")
            if name in found:
                raise ValueError(f"tensor {name} is there twice")
            found[name] = StoredTensor(shape, kind, base + offset, size)
        return found

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        dimensions = self._scalar("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        innermost_first = [self._scalar("Q") for _ in range(dimensions)]
        return name, tuple(reversed(innermost_first)), self._scalar("I"), self._scalar("Q")

    def _scalar(self, form: str) -> Any:
        value = struct.unpack_from("<" + form, self._data, self._at)[0]
        self._at += struct.calcsize("<" + form)
        return value

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise ValueError("the header ends too soon")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def _text(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            inner, count = self._scalar("I"), self._scalar("Q")
            if inner in _SCALARS:
                form = _SCALARS[inner]
                raw = self._take(count * struct.calcsize("<" + form))
                return list(struct.unpack(f"<{count}{form}", raw))
            return [self._value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"a value of unknown type {kind}")
        return self._scalar(_SCALARS[kind])
