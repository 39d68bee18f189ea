"""The prefix cache: full blocks named by everything up to their end, so that equal prefixes share memory.

A block's hash covers its parent's hash, its 16 token ids and, at the root, the salt and which of the
model's rotary frequencies its keys have. It is SHA-256: a
collision that somebody makes on purpose would put another prompt's memory into an answer, so the hash must
be one for which nobody can. This file knows tokens and blocks; it may not decide who runs.
"""

from __future__ import annotations

import hashlib
from array import array

from pagemill.engine.cache.blocks import BlockPool
from pagemill.engine.config import BLOCK_SIZE
from pagemill.engine.sequence import Sequence


def block_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """Hash of one full block after `parent`; ids as 32-bit, so that no two lists spell the same bytes."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()


def root_hash(salt: str, long_rope: bool = False) -> bytes:
    """The parent of first blocks: prompts with different salts share nothing, nor do rows whose keys turn
    by different frequencies."""
    return hashlib.sha256((b"pagemill long " if long_rope else b"pagemill ") + salt.encode()).digest()


def extend_hashes(seq: Sequence, count: int) -> None:
    """Hash the row's first `count` blocks, those not hashed yet; all their tokens must be known."""
    hashes = seq.block_hashes
    parent = hashes[-1] if hashes else root_hash(seq.request.cache_salt, seq.long_rope)
    for i in range(len(hashes), count):
        parent = block_hash(parent, seq.token_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE])
        hashes.append(parent)


class PrefixCache:
    """Finds what is cached, and publishes what has been computed.

    A published block is never written again: a row writes beyond its computed tokens only, and these end
    beyond every full block that it found or published. Blocks are published over tokens that were read and
    accepted: a token that a step draws is computed by a later one, whose result is read later too.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._pool = pool

    def usable_blocks(self, seq: Sequence) -> int:
        """How many leading blocks may come from the cache: never all tokens, as the last one's logits are
        needed and are not cached."""
        return (len(seq.token_ids) - 1) // BLOCK_SIZE if self.enabled else 0

    def find(self, seq: Sequence) -> list[int]:
        """The longest run of cached blocks at the beginning of the row. Nobody holds them for it yet."""
        usable = self.usable_blocks(seq)
        extend_hashes(seq, usable)
        found: list[int] = []
        for label in seq.block_hashes[:usable]:
            block = self._pool.find(label)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, seq: Sequence, begin: int, end: int) -> list[bytes]:
        """Label the blocks that a step over tokens [begin, end) has filled, and return their hashes."""
        if not self.enabled:
            return []
        first, end = begin // BLOCK_SIZE, end // BLOCK_SIZE
        if first == end:
            return []
        extend_hashes(seq, end)
        for i in range(first, end):
            self._pool.label(seq.block_table[i], seq.block_hashes[i])
        return seq.block_hashes[first:end]
