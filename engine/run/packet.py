"""All that one step wants from the host, in one run of 32-bit words that is copied to the card at once.

Knows names, dtypes and places; it may not know what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.generic]
# Sections begin at multiples of so many words, as vectors of a kernel's loads do.
ALIGNMENT = 16
DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class Layout:
    """Where each section lies. sections: name, dtype and most numbers of each."""

    def __init__(self, sections: Sequence[tuple[str, npt.DTypeLike, int]]) -> None:
        self.places: dict[str, tuple[int, int, np.dtype[np.generic]]] = {}
        end = 0
        for name, kind, count in sections:
            dtype = np.dtype(kind)
            words = count * dtype.itemsize // 4
            self.places[name] = (end, words, dtype)
            end += -(-words // ALIGNMENT) * ALIGNMENT
        self.words = max(end, ALIGNMENT)

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Layout:
        """One that just holds these."""
        return cls([(name, array.dtype, array.size) for name, array in arrays.items()])

    def write(self, words: Tensor, name: str, values: Array) -> None:
        """Puts values at the beginning of a section of the host's words, int32 [words]."""
        begin, size, dtype = self.places[name]
        there = words.numpy()[begin : begin + size].view(dtype)
        there[: values.size] = values.reshape(-1)

    def read(self, words: Tensor, name: str) -> Tensor:
        """A section of the device's words, as a view."""
        begin, size, dtype = self.places[name]
        return words[begin : begin + size].view(DTYPES[dtype])
