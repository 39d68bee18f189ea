"""Input files of any length for load runs: rows of about one size, no two alike, the same every time."""

from __future__ import annotations

import random
from pathlib import Path

BLOCK = 1000
FIRSTS, SECONDS = 1009, 1013  # primes: a million rows pass before two halves meet again
WORDS = (
    "river", "stone", "market", "letter", "winter", "garden", "engine", "number", "window", "silver",
    "bridge", "simple", "answer", "because", "before", "morning", "paper", "island", "carry", "travel",
    "common", "quiet", "narrow", "reason", "second", "beside", "measure", "gather", "follow", "among",
)  # fmt: skip


def write_rows(path: Path, rows: int, row_bytes: int = 500) -> int:
    """Writes `rows` lines of about `row_bytes` each, an id and a prompt in it; returns the file's size.

    A prompt is its number and two of a thousand halves, which compress about as prose does.
    """
    chance = random.Random(7)
    room = max(0, row_bytes - len(_line(10**7, "")))
    halves = [
        [_prose(chance, size) for _ in range(count)]
        for count, size in ((FIRSTS, room // 2), (SECONDS, room - room // 2))
    ]
    with path.open("wb") as file:
        for start in range(0, rows, BLOCK):
            numbers = range(start, min(rows, start + BLOCK))
            text = "".join(_line(n, halves[0][n % FIRSTS] + halves[1][n % SECONDS]) for n in numbers)
            file.write(text.encode())
        return file.tell()


def _line(number: int, text: str) -> str:
    return f'{{"custom_id":"r{number}","prompt":"{number} {text}","max_tokens":128}}\n'


def _prose(chance: random.Random, size: int) -> str:
    return " ".join(chance.choices(WORDS, k=1 + size // 5))[:size]
