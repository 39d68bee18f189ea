"""Lengths of 1,000 prompts and answers like those of conversations: most are short, a few are long.

`lengths.csv` holds what `table()` makes; `python -m gpu_check.lengths` writes it anew. Prompts and answers
follow log-normal distributions, cut at 1,024 tokens, whose means come out as in samples of ShareGPT:
prompts of about 220 tokens and answers of about 190. Quantiles in equal steps, and not draws, so that 1,000
rows have these means, and shuffled by a seed, so that a long prompt tells nothing of its answer.
"""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path
from statistics import NormalDist

PATH = Path(__file__).with_name("lengths.csv")
ROWS, MOST, LEAST = 1000, 1024, 4
# Median and spread of the logarithm: chosen for the means after the cut.
PROMPT, ANSWER = (116.0, 1.30), (120.0, 1.00)


def read() -> list[tuple[int, int]]:
    """Tokens of each prompt and its answer."""
    with PATH.open(newline="") as file:
        return [(int(line["prompt"]), int(line["answer"])) for line in csv.DictReader(file)]


def table() -> list[tuple[int, int]]:
    prompts, answers = _lengths(*PROMPT), _lengths(*ANSWER)
    shuffled = random.Random(20_26)
    shuffled.shuffle(prompts)
    shuffled.shuffle(answers)
    return list(zip(prompts, answers, strict=True))


def _lengths(median: float, spread: float) -> list[int]:
    normal = NormalDist(math.log(median), spread)
    quantiles = (math.exp(normal.inv_cdf((row + 0.5) / ROWS)) for row in range(ROWS))
    return [min(MOST, max(LEAST, round(length))) for length in quantiles]


if __name__ == "__main__":
    with PATH.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("prompt", "answer"), *table()])
