"""In which order rows run, and where the order is cut into shards.

Rows that share a prefix should run next to each other, so that the engine computes it once; depth first
through the tree of all prefixes is the best order there is, and sorting by text is that order. A shard
should end where neighbours share little. This room knows rows and bytes. It may not know tokenizers: four
bytes of UTF-8 are taken for a token, and work is counted in tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from pagemill.jobs.row import Row

BYTES_PER_TOKEN: Final = 4
# What a row is taken to produce where it does not say less: answers rarely use all they may.
EXPECTED_TOKENS: Final = 256
_MOST: Final = 1 << 30
# Sharing is compared in memory blocks of the engine: less than one makes no difference.
_BLOCK: Final = 16 * BYTES_PER_TOKEN
# A shard may be cut from this share of its limit on, where neighbours share least.
_EARLIEST: Final = 0.6

_LITERAL: Final = 1024
_HASH: Final = 8
# Ends of the pieces behind the literal start of a prompt, each hashed: by kilobytes, then doubling.
_ENDS: Final = tuple(range(2048, 32768 + 1, 1024)) + tuple(1 << power for power in range(16, 33))


def prompt_bytes(row: Row) -> bytes:
    """What rows are compared by: equal starts here are equal starts of the rendered prompt."""
    if row.prompt is not None:
        return b"p" + row.prompt.encode()
    if row.prompt_token_ids is not None:
        return b"t" + array("I", row.prompt_token_ids).tobytes()
    messages = row.messages or []
    # A length in front would part chats that start alike; a zero byte ends a message.
    return b"m" + "".join(f"{m['role'][0]}{m['content']}\0" for m in messages).encode()


def prefix_key(text: bytes) -> bytes:
    """A short stand-in for a prompt that sorts prompts with equal starts together.

    Up to 1 KiB as it is, then hashes of the pieces that follow: all of a long document would make the
    sort as large as the input, and a plain cut would mix the documents that follow one system prompt.
    """
    if len(text) <= _LITERAL:
        return text
    parts = [text[:_LITERAL]]
    start = _LITERAL
    for end in _ENDS:
        parts.append(blake2b(text[start:end], digest_size=_HASH).digest())
        if end >= len(text):
            break
        start = end
    return b"".join(parts)


def shared_bytes(left: bytes, right: bytes) -> int:
    """How many bytes two prompts share at the start, as far as their keys tell: to the kilobyte behind the
    first, and possibly more than the prompts are long where they are equal."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        low = high
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    if low < _LITERAL:
        return low
    pieces = (low - _LITERAL) // _HASH
    return _LITERAL if pieces == 0 else _ENDS[pieces - 1]


def expected_output(row: Row) -> int:
    """Tokens that a row is taken to produce, over all its samples."""
    tokens: int = min(row.params.get("max_tokens", EXPECTED_TOKENS), EXPECTED_TOKENS)
    tokens = max(tokens, row.params.get("min_tokens", 0))
    samples: int = row.params.get("n", 1)
    return min(tokens * samples, _MOST)


@dataclass(frozen=True, slots=True)
class Item:
    """A row in its place in the order. `shared`: bytes it shares with the row before it."""

    data: bytes
    size: int
    output: int
    shared: int

    def work(self) -> int:
        """Tokens to compute when the row before it has just been computed."""
        return max(self.size - self.shared, 0) // BYTES_PER_TOKEN + self.output + 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What a shard may hold; one row is never too much."""

    tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows of one shard, in order, and the work they are."""

    rows: list[bytes]
    tokens: int


def cut(items: Iterable[Item], limits: Limits) -> Iterator[Cut]:
    """Shards of at most the limits, each ending where the least is shared with what follows."""
    waiting: list[Item] = []
    work = 0
    for item in items:
        while waiting and (work + item.work() > limits.tokens or len(waiting) + 1 > limits.rows):
            end = _best_end(waiting, item, limits)
            yield _cut(waiting[:end])
            waiting = waiting[end:]
            work = _work(waiting)
        waiting.append(item)
        work = _work(waiting) if len(waiting) == 1 else work + item.work()
    if waiting:
        yield _cut(waiting)


def _best_end(waiting: list[Item], following: Item, limits: Limits) -> int:
    """How many of the waiting rows to cut off: the latest place among those where least is shared."""
    best, least, work = len(waiting), following.shared // _BLOCK, 0
    ends: list[tuple[int, int]] = []
    for index, item in enumerate(waiting):
        full = max(work / limits.tokens, index / limits.rows)
        if index and full >= _EARLIEST:
            ends.append((index, item.shared // _BLOCK))
        work += item.work() if index else _work([item])
    for end, shared in reversed(ends):
        if shared < least:
            best, least = end, shared
    return best


def _work(items: list[Item]) -> int:
    """The work of a shard: its first row has nobody before it."""
    if not items:
        return 0
    first = items[0].size // BYTES_PER_TOKEN + items[0].output + 1
    return first + sum(item.work() for item in items[1:])


def _cut(items: list[Item]) -> Cut:
    return Cut([item.data for item in items], _work(items))
