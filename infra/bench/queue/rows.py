"""Input files of any length for load runs: rows of about one size, no two alike, the same every time."""

from __future__ import annotations

import json
import random
from pathlib import Path

BLOCK = 1000
SENTENCES = 512
WORDS = [
    "river",
    "stone",
    "market",
    "letter",
    "winter",
    "garden",
    "engine",
    "number",
    "window",
    "silver",
    "bridge",
    "simple",
    "answer",
    "because",
    "before",
    "morning",
    "paper",
    "island",
    "carry",
    "travel",
    "common",
    "quiet",
    "narrow",
    "reason",
    "second",
    "beside",
    "measure",
    "gather",
    "follow",
    "among",
]


def write_rows(path: Path, rows: int, row_bytes: int = 500) -> int:
    """Writes `rows` lines of about `row_bytes` each, an id and a prompt in it; returns the file's size.

    The prompts are made of a few hundred sentences, so that they compress about as prose does.
    """
    chance = random.Random(7)
    sentences = [" ".join(chance.choices(WORDS, k=10)) + ". " for _ in range(SENTENCES)]
    with path.open("wb") as file:
        for start in range(0, rows, BLOCK):
            lines = (_line(chance, sentences, n, row_bytes) for n in range(start, min(rows, start + BLOCK)))
            file.write("".join(lines).encode())
        return file.tell()


def _line(chance: random.Random, sentences: list[str], number: int, row_bytes: int) -> str:
    frame = json.dumps({"custom_id": f"r{number}", "prompt": "", "max_tokens": 128})
    room = max(1, row_bytes - len(frame) - 1)
    text = "".join(chance.choices(sentences, k=1 + room // 60)) if room > 20 else ""
    prompt = f"{number} {text}"[:room].rstrip()
    return frame.replace('"prompt": ""', f'"prompt": "{prompt}"') + "\n"
