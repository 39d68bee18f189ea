"""What a waiting row costs the scheduler, from a thousand rows to a hundred thousand: it should be flat.

    python infra/bench/waiting.py [--rows 1000,10000,100000] [--rounds 3] --json FILE

A model that computes nothing stands in for the real one, so that all of the time is requests coming in,
waiting in order, being let in and ending. Half of the rows share prompts of four blocks with fifteen others,
half share nothing; there are three groups and two priorities. Microseconds a row are medians of the rounds,
in CPU time of the thread, which other programs on the machine disturb less than they do the clock.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure

from pagemill.engine import ModelInfo, Request, SamplingParams, SchedulerConfig
from pagemill.engine.batch import Batch, ReadResult, StepResult
from pagemill.engine.engine import Engine

ANSWER = 4
PROMPT = 70
BLOCKS = 2048


class Nothing:
    """The runner: every row's next token is 1."""

    depth = 0

    def begin(self, batch: Batch) -> ReadResult:
        count = len(batch.sequences)
        tokens = tuple(1 if batch.samples(i) else None for i in range(count))
        result = StepResult(tokens, (True,) * count, (None,) * count)
        return lambda: result


class Mute:
    """The tokenizer: all text is empty."""

    byte_token_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


def rows_of(count: int) -> list[Request]:
    chance = random.Random(count)
    stem: list[int] = []
    made = []
    for n in range(count):
        if n % 32 == 0:
            stem = [chance.randrange(1, 50_000) for _ in range(64)]
        shared = stem if n % 2 else [chance.randrange(1, 50_000) for _ in range(64)]
        ids = (*shared, *(chance.randrange(1, 50_000) for _ in range(PROMPT - 64)))
        sampling = SamplingParams(max_tokens=chance.randint(1, 2 * ANSWER - 1), temperature=0.0)
        made.append(Request(f"{n}", ids, sampling, priority=n % 2, group=f"{n % 3}"))
    chance.shuffle(made)
    return made


def once(requests: Sequence[Request]) -> tuple[float, float]:
    """Seconds to take all of them in, and to run them to their end."""
    info = ModelInfo("none", "", "", "none", "none", 4096, 50_000, BLOCKS, BLOCKS * 16)
    limits = SchedulerConfig(BLOCKS, 4096, max_num_tokens=2048, max_num_seqs=256)
    engine = Engine(Nothing(), Mute(), info, limits)  # type: ignore[arg-type]
    began = time.thread_time()
    for request in requests:
        engine.add(request)
    added = time.thread_time()
    ended = 0
    while engine.has_work:
        ended += len(engine.step())
    assert ended == len(requests), "Rows were lost."
    return added - began, time.thread_time() - added


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure what a waiting row costs the scheduler.")
    parser.add_argument("--rows", default="1000,10000,100000", help="how many wait, one after another")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(words)
    found: dict[str, Any] = {}
    for count in map(int, options.rows.split(",")):
        requests = rows_of(count)
        runs = [once(requests) for _ in range(options.rounds)]
        add, run = (statistics.median(side) / count * 1e6 for side in zip(*runs, strict=True))
        found[str(count)] = {
            "add_us": round(add, 1),
            "run_us": round(run, 1),
            "total_us": round(add + run, 1),
        }
        print(f"{count} rows: {add:.1f} us to come in, {run:.1f} us to run", file=sys.stderr)
    about = {"command": measure.command_line(), "machine": measure.machine(), "rounds": options.rounds}
    measure.save(options.json, {**about, "a_row": found})


if __name__ == "__main__":
    main()
