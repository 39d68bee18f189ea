"""From token ids to text: once when a row ends, and piece by piece where it streams or has stop strings.

The text of a row is always the decode of its whole list of ids. Decoding token by token is not that: a
character may be spread over several tokens, and decoders look at neighbours (a leading space is stripped,
a run of byte tokens is judged as a whole). So pieces are decoded in a window that overlaps what is known,
and nothing is released that a later token could still change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# A window is decoded again for each token; it is cut to KEEP tokens whenever it has grown to LONGEST.
_KEEP = 6
_LONGEST = 16


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens skipped, bytes that are no character as U+FFFD."""
        ...


class PartialText:
    """The text of one row while it grows, and the first stop string in it.

    text: what no later token can change. match: (index in `text`, stop string) once one was found.
    byte_token_ids: ids that stand for single bytes (SentencePiece's <0x0A>): a run of them is decoded as a
        whole, so a character made of them is certain only when another token follows.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        byte_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.text = ""
        self.match: tuple[int, str] | None = None
        self._decoder = decoder
        self._stop = stop
        self._min_tokens = min_tokens
        self._byte_token_ids = byte_token_ids
        self._window = 0  # index of the first output token that is decoded again
        self._taken = 0  # how many characters of the window's text are in self.text
        self._searched = 0  # characters in which a stop string may no longer end
        self._released = 0

    def advance(self, output_ids: Sequence[int]) -> None:
        """Take in the row's output so far, which has grown since the last call."""
        ids = output_ids[self._window :]
        decoded = self._decoder.decode(ids)
        certain = self._certain(decoded, ids)
        if certain > self._taken:
            self.text += decoded[self._taken : certain]
            self._taken = certain
        if certain == len(decoded) and len(ids) >= _LONGEST:
            self._cut_window(len(output_ids) - _KEEP, decoded, output_ids)
        if len(output_ids) >= self._min_tokens:
            self._search()
        self._searched = len(self.text)

    def release(self) -> str:
        """Text to show now: new since the last call, and surely not the beginning of a stop string."""
        end = len(self.text) if self.match is None else self.match[0]
        if self.match is None:
            end -= max((_overlap(self.text, stop) for stop in self._stop), default=0)
        piece = self.text[self._released : end]
        self._released = max(self._released, end)
        return piece

    def settle(self, text: str, num_tokens: int) -> str:
        """Take the row's final text, of which some may have been uncertain until now, and cut it before the
        stop string that ended it."""
        self.text = text
        if self.match is None and num_tokens >= self._min_tokens:
            self._search()
        if self.match is None:
            return text
        index, stop = self.match
        if not text.startswith(stop, index):
            # A decoder that changes text it has given out before: what counts is the whole.
            index = text.find(stop)
        return text[:index] if index >= 0 else text

    def rest(self, text: str) -> str:
        """What is left to show of the row's final text, already cut."""
        return text[self._released :]

    def _certain(self, decoded: str, ids: Sequence[int]) -> int:
        """How many characters of the window's text no later token can change."""
        if ids and ids[-1] in self._byte_token_ids:
            return 0
        return len(decoded.rstrip(REPLACEMENT))

    def _cut_window(self, start: int, decoded: str, output_ids: Sequence[int]) -> None:
        """Begin the window at `start` if it decodes there to the same text; else later, at another token."""
        shorter = self._decoder.decode(output_ids[start:])
        # An empty one would take the next token for the first of the text, and lose its space.
        if shorter and decoded.endswith(shorter):
            self._window = start
            self._taken = len(shorter)

    def _search(self) -> None:
        """Find the earliest stop string that ends in the text not searched before."""
        found = [
            (index, stop)
            for stop in self._stop
            if (index := self.text.find(stop, max(0, self._searched - len(stop) + 1))) >= 0
        ]
        if found and self.match is None:
            self.match = min(found, key=lambda pair: pair[0])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that could be the beginning of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
