"""The four workloads: which prompts, how many tokens each has and gets.

    python infra/bench/workloads.py --model smollm2 --folder out/bench/workloads

W1 short chats · W2 one system prompt of 1,000 tokens before 256 short questions · W3 lengths from 20 to
3,000 · W4 short prompts with long answers. Output lengths are fixed and ends of sequence ignored, so that
every engine does the same work. Everything follows from the seed, the tokenizer and the text, which is the
Python documentation that CPython carries (pydoc_data.topics): nothing is downloaded, but the text changes
with Python's version, so that the manifest names both and the digests of what came out.

For each workload there is W?.jsonl, the rows as an OpenAI batch file, and W?.tok.json, the same rows as
token ids, which is what engines are measured on: none of them can gain by another tokenizer. Reading needs
the standard library alone, since peers read too; writing needs our tokenizer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagemill.engine.tokenizer import Tokenizer

SEED = 20261129
# A template without a system message would add the model's own, of 20 tokens.
SYSTEM = "Be brief."
# Nobody begins so near the end of the text that it would run out.
TAIL_WORDS = 4000

Chat = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Item:
    """One row as engines get it: prompt ids, and exactly how many tokens to make."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Draft:
    """One row before the chat template."""

    messages: Chat
    max_tokens: int


@cache
def corpus() -> tuple[str, ...]:
    """The text's words."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found,unused-ignore]

    return tuple(" ".join(topics[name] for name in sorted(topics)).split())


class Writer:
    """Draws passages of a given length, and numbers, from one stream of chance for each workload."""

    def __init__(self, tokenizer: Tokenizer, workload: str, seed: int = SEED) -> None:
        self.chance = random.Random(f"{seed}-{workload}")
        self.tokenizer = tokenizer
        #: Tokens that the template and an empty question take.
        self.overhead = overhead(tokenizer)

    def passage(self, tokens: int) -> str:
        """Text of about so many tokens, from a random place."""
        words = corpus()
        start = self.chance.randrange(0, len(words) - TAIL_WORDS)
        text = " ".join(words[start : start + max(8, tokens + 8)])
        return self.tokenizer.decode(plain_ids(self.tokenizer, text)[:tokens]).strip()

    def question(self, prompt_tokens: int) -> Chat:
        """A chat whose prompt has about so many tokens, template included."""
        return chat(self.passage(max(1, prompt_tokens - self.overhead)))

    def between(self, low: int, high: int) -> int:
        return self.chance.randint(low, high)

    def log_between(self, low: int, high: int) -> int:
        """As many below the geometric mean as above it."""
        return round(math.exp(self.chance.uniform(math.log(low), math.log(high))))


def chat(text: str, system: str = SYSTEM) -> Chat:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a passage, without the BOS that would begin a prompt."""
    ids = tokenizer.encode_prompt(text)
    return ids[1:] if ids and ids[0] == tokenizer.bos_token_id else ids


def overhead(tokenizer: Tokenizer) -> int:
    return len(tokenizer.render_chat(chat("")))


def _short_chats(writer: Writer) -> Iterator[Draft]:
    for _ in range(256):
        yield Draft(writer.question(writer.between(30, 120)), writer.between(16, 128))


def _shared_prefix(writer: Writer) -> Iterator[Draft]:
    system = writer.passage(1000)
    for _ in range(256):
        yield Draft(chat(writer.passage(writer.between(20, 60)), system), 32)


def _mixed_lengths(writer: Writer) -> Iterator[Draft]:
    for _ in range(96):
        yield Draft(writer.question(writer.log_between(20, 3000)), writer.log_between(8, 256))


def _long_answers(writer: Writer) -> Iterator[Draft]:
    for _ in range(128):
        yield Draft(writer.question(32), 256)


WORKLOADS: dict[str, tuple[str, Callable[[Writer], Iterator[Draft]]]] = {
    "W1": ("short chat", _short_chats),
    "W2": ("one shared ~1000-token system prompt", _shared_prefix),
    "W3": ("mixed lengths", _mixed_lengths),
    "W4": ("decode heavy", _long_answers),
}
NAMES = tuple(WORKLOADS)


def draw(name: str, tokenizer: Tokenizer, seed: int = SEED) -> list[Draft]:
    """The rows of one workload, always the same ones for the same seed, tokenizer and Python."""
    return list(WORKLOADS[name][1](Writer(tokenizer, name, seed)))


def batch_line(row_id: str, draft: Draft, model: str = "smollm2-135m") -> str:
    """One request of an OpenAI batch file."""
    body = {
        "model": model,
        "messages": draft.messages,
        "max_tokens": draft.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    line = {"custom_id": row_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line)


def write(folder: Path, tokenizer: Tokenizer, seed: int = SEED) -> dict[str, Any]:
    """Writes all workloads and manifest.json, which it returns: lengths, totals, digests."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {
        "seed": seed,
        "python": platform.python_version(),
        "corpus_sha256": hashlib.sha256(" ".join(corpus()).encode()).hexdigest(),
        "template_overhead_tokens": overhead(tokenizer),
        "workloads": {},
    }
    for name, (description, _) in WORKLOADS.items():
        drafts = draw(name, tokenizer, seed)
        ids = [f"{name}-{i:04d}" for i in range(len(drafts))]
        prompts = [tokenizer.render_chat(draft.messages) for draft in drafts]
        items = [
            {"id": row_id, "prompt": prompt, "max_tokens": draft.max_tokens}
            for row_id, prompt, draft in zip(ids, prompts, drafts, strict=True)
        ]
        lines = "".join(batch_line(row_id, d) + "\n" for row_id, d in zip(ids, drafts, strict=True))
        manifest["workloads"][name] = {
            "desc": description,
            "requests": len(items),
            "prompt_tokens": _spread([len(prompt) for prompt in prompts]),
            "output_tokens": _spread([draft.max_tokens for draft in drafts]),
            "jsonl_sha256": _save(folder / f"{name}.jsonl", lines),
            "tok_sha256": _save(folder / f"{name}.tok.json", json.dumps(items)),
        }
    _save(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    return manifest


def read(folder: Path, name: str, rows: int | None = None, max_tokens: int | None = None) -> list[Item]:
    """A workload that was written: all of it, or the first `rows` rows, or at most `max_tokens` a row."""
    stored = json.loads((folder / f"{name}.tok.json").read_text())
    most = math.inf if max_tokens is None else max_tokens
    return [Item(i["id"], tuple(i["prompt"]), int(min(i["max_tokens"], most))) for i in stored[:rows]]


def warm_up(rows: int, max_tokens: int = 12) -> list[Item]:
    """Short rows that share no prefix with any workload."""
    prompts = [tuple((7 * i + 13 * j) % 2000 + 300 for j in range(40 + 8 * i)) for i in range(rows)]
    return [Item(f"warm-{i}", prompt, max_tokens) for i, prompt in enumerate(prompts)]


def digest(folder: Path, name: str) -> str:
    """Tells one version of a workload from another."""
    return hashlib.sha256((folder / f"{name}.tok.json").read_bytes()).hexdigest()


def ensure(folder: Path, model: Path) -> None:
    """Writes the workloads into `folder` unless they are there."""
    if not (folder / "manifest.json").is_file():
        from pagemill.engine.tokenizer import Tokenizer

        write(folder, Tokenizer.from_path(model))


def _spread(values: list[int]) -> dict[str, float]:
    return {
        "min": min(values),
        "p50": statistics.median(values),
        "mean": round(statistics.mean(values), 1),
        "max": max(values),
        "sum": sum(values),
    }


def _save(path: Path, text: str) -> str:
    """Writes beside the place and renames: whoever finds manifest.json finds all of it."""
    half = path.with_name(path.name + ".part")
    half.write_text(text)
    half.replace(path)
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    from pagemill.engine.tokenizer import Tokenizer
    from pagemill.worker.models import resolve_model

    parser = argparse.ArgumentParser(description="Write the four workloads of the benchmark.")
    parser.add_argument("--model", default="smollm2", help="smollm2, a directory or a .gguf file")
    parser.add_argument("--folder", type=Path, default=Path("out/bench/workloads"))
    options = parser.parse_args()
    tokenizer = Tokenizer.from_path(resolve_model(options.model))
    print(json.dumps(write(options.folder, tokenizer), indent=1))


if __name__ == "__main__":
    main()
