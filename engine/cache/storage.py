"""The memory that keys and values live in.

One tensor [blocks, layers, 2, kv_heads, head_dim * 16] with 16 tokens a block, the same on every device:

- all layers of a block lie together, so moving a block (to the host, to another worker) is one copy;
- a head's keys lie transposed, [head_dim, 16]: on CPU one vector register holds one dimension of many
  tokens, and a score is a chain of multiply-adds without a horizontal sum; values lie [16, head_dim], as
  the weighted sum over tokens wants them;
- what one head of one layer holds of a block is a contiguous chunk (4 KB at head_dim 64 in float32, 2 to 4
  KB in 16 bits), which a CUDA kernel loads with one block-table lookup a tile.

A memory of 8 bits has scales beside it, as kernels/cache_write.py writes them: float32 [blocks, layers, 2,
kv_heads, 16], of which the same holds.

A token's place is a slot: block * 16 + offset. This room may not know which row owns which block.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from pagemill.engine.config import BLOCK_SIZE
from pagemill.kernels import cache_write
from pagemill.kernels.eight_bits import LARGEST

assert cache_write.BLOCK_SIZE == BLOCK_SIZE, "memory blocks and hash blocks are one size"


class KVStorage:
    """Blocks of keys and values. Memory is taken from the system when a block is first touched."""

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Not zeros: that would touch every page at start-up. A block is cleared when it is begun.
        self.tensor = torch.empty(
            (num_blocks, num_layers, 2, num_kv_heads, head_dim * BLOCK_SIZE), dtype=dtype, device=device
        )
        self.scales: Tensor | None = None
        if dtype in LARGEST:
            self.scales = torch.empty((num_blocks, num_layers, 2, num_kv_heads, BLOCK_SIZE), device=device)
        if self.tensor.device.type == "cpu":
            _ask_for_large_pages(self.tensor)

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[0]

    def layer(self, index: int) -> Tensor:
        """One layer of all blocks: a view [blocks, 2, kv_heads, head_dim * 16]."""
        return self.tensor[:, index]

    def layer_scales(self, index: int) -> Tensor | None:
        """Those of one layer: a view [blocks, 2, kv_heads, 16]; None in a memory of more than 8 bits."""
        return None if self.scales is None else self.scales[:, index]

    def clear(self, blocks: Tensor) -> None:
        """Zeroes blocks that are about to be begun; int64 ids."""
        if blocks.numel():
            cache_write.clear_blocks(self.tensor, blocks)
            if self.scales is not None:
                self.scales.index_fill_(0, blocks, 0.0)


def _ask_for_large_pages(tensor: Tensor) -> None:
    """Pages of 2 MB where the system gives them on request: attention reads chunks of a few KB from all over
    the memory, and with pages of 4 KB looks up an address for each (64 rows of 1,000 tokens in bfloat16:
    a quarter slower). Where it does not, nothing is lost."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - begin
    if size > 0:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        madvise(begin, size // mmap.PAGESIZE * mmap.PAGESIZE, advice)


def block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, its scales with it."""
    token = head_dim * dtype.itemsize + (torch.float32.itemsize if dtype in LARGEST else 0)
    return num_layers * 2 * num_kv_heads * token * BLOCK_SIZE
