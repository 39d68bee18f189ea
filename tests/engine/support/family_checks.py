"""What every family must show: transformers' logits, and its tokens however the rows are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from engine_fakes import FakeTokenizer, check, request
from tiny_gguf import write_gguf
from tiny_models import all_logits, open_runner, prompts, reference_greedy, reference_logits, save
from transformers import PreTrainedModel

from pagemill.engine.config import ModelInfo, SchedulerConfig
from pagemill.engine.engine import Engine
from pagemill.engine.run.runner import ModelRunner

ANSWER = 64
CONTEXT = 512
# Prompts shorter and longer than the windows and original contexts of the tests, two with one beginning.
LENGTHS = (1, 16, 37, 90)

LOADERS: dict[str, Callable[[PreTrainedModel, Path], Path]] = {
    "safetensors": lambda model, folder: save(model, folder / "tiny"),
    "gguf": lambda model, folder: write_gguf(model, folder / "tiny.gguf"),
}
# How the rows of one engine are run: budget of a step, prefix cache, blocks of memory.
REGIMES = {
    "together": (512, True, 128),
    "in chunks": (11, True, 128),
    "without the prefix cache": (40, False, 128),
    "preempted": (40, True, 12),
}


def check_logits(model: PreTrainedModel, path: Path, longest: int = 200) -> None:
    """Of every position of a short and a long text, within 1e-4."""
    runner = open_runner(path)
    for length in (20, longest):
        ids = text(length, seed=length)
        torch.testing.assert_close(all_logits(runner, ids), reference_logits(model, ids), rtol=0, atol=1e-4)


def check_tokens(model: PreTrainedModel, path: Path, regimes: Iterable[str] = REGIMES) -> None:
    """64 greedy tokens of prompts that run beside one another."""
    rows = [text(length, seed=length) for length in LENGTHS]
    rows.append([*rows[-1][:70], *text(5, seed=3)])
    expected: list[list[int]] = []
    for name in regimes:
        budget, cache, blocks = REGIMES[name]
        engine = engine_over(open_runner(path, blocks), budget, cache)
        found = answers(engine, rows)
        expected = expected or [greedy_answer(model, *row) for row in zip(rows, found, strict=True)]
        assert found == expected, name
        metrics = engine.metrics()
        if name == "preempted":
            assert metrics.preemptions > 0
        else:
            assert (metrics.cached_tokens > 0) == cache, name


def greedy_answer(model: PreTrainedModel, ids: list[int], found: list[int]) -> list[int]:
    """What transformers answers. Given what was found one pass tells: as long as the two agree, so do the
    texts that each token follows. Not so where longer texts turn by other frequencies."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return reference_greedy(model, ids, ANSWER)
    logits = reference_logits(model, [*ids, *found[:-1]])
    return logits[len(ids) - 1 :].argmax(-1).tolist()  # type: ignore[no-any-return]


def text(length: int, seed: int) -> list[int]:
    return (prompts(1, seed=seed, longest=1000)[0] * length)[:length]


def engine_over(runner: ModelRunner, budget: int, cache: bool) -> Engine:
    spec, blocks = runner.decoder.spec, runner.storage.num_blocks
    info = ModelInfo("tiny", "", "", "float32", "cpu", CONTEXT, spec.vocab_size, blocks, blocks * 16)
    limits = SchedulerConfig(
        blocks, CONTEXT, max_num_tokens=budget, prefix_cache=cache, rope_switch=spec.rope_switch
    )
    engine = Engine(runner, FakeTokenizer(), info, limits)  # type: ignore[arg-type]
    engine.scheduler.admission.growth = lambda seq: 0.0  # type: ignore[method-assign]
    return engine


def answers(engine: Engine, rows: list[list[int]]) -> list[list[int]]:
    for i, ids in enumerate(rows):
        engine.add(request(str(i), ids, ANSWER, temperature=0.0))
    done = {}
    while engine.has_work:
        done.update({completion.request_id: completion for completion in engine.step()})
        check(engine)
    return [list(done[str(i)].token_ids) for i in range(len(rows))]
