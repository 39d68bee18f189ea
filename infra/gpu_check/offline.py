"""Offline throughput of models of real shapes with random weights: 1,000 rows handed over at once.

Lengths are those of `lengths.csv`, answers are greedy and end where the table says. Beside the roofline of
the same run and transformers' continuous batching on the same card; and once more with a prefix before
every prompt that is half of what a row reads, the same for all rows or each row's own, which is what
sharing is worth.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from gpu_check import lengths
from gpu_check.clock import synchronize
from gpu_check.engines import TINY, answers, config_of, greedy, on_card, random_model
from gpu_check.record import Check, Figure, Findings
from gpu_check.roofline import Rates, decode_seconds, least_seconds, load_of, prefill_seconds
from gpu_check.setting import Setting
from gpu_check.theirs import batched
from pagemill.engine.engine import Engine
from pagemill.engine.models.registry import family_of_config
from pagemill.engine.models.spec import DecoderSpec
from pagemill.engine.request import Request
from pagemill.engine.run.card_runner import CardRunner

ROOFLINE_MARK, THEIRS_MARK, SHARED_MARK, GAP_MARK = 0.75, 3.0, 1.4, 0.03
BLOCK = 16
Lengths = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Shape:
    """marked: whether the promises are about it."""

    name: str
    architecture: str
    config: PreTrainedConfig
    marked: bool = False

    def record(self) -> dict[str, Any]:
        return config_of(self.config, self.architecture)

    def spec(self) -> DecoderSpec:
        family = family_of_config(self.record())
        assert family is not None
        return family.spec_from_config(self.record())


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama(setting: Setting) -> Shape:
    sizes: dict[str, Any] = {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA3,
        "tie_word_embeddings": False,
    }
    config = LlamaConfig(**(sizes | (TINY if setting.dry else {})))
    return Shape("Llama-3.1-8B", "LlamaForCausalLM", config, marked=True)


def qwen(setting: Setting) -> Shape:
    sizes: dict[str, Any] = {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
    }
    return Shape("Qwen3-0.6B", "Qwen3ForCausalLM", Qwen3Config(**(sizes | (TINY if setting.dry else {}))))


def table(setting: Setting) -> Lengths:
    whole = lengths.read()
    return [(1 + prompt % 9, 2) for prompt, _ in whole[:2]] if setting.dry else whole


def prefix_of(rows: Lengths) -> int:
    """Tokens before every prompt so that half of what rows read, on the mean, is shared: in whole blocks."""
    own = statistics.mean(prompt + answer / 2 for prompt, answer in rows)
    return max(1, round(own / BLOCK)) * BLOCK


def prompts(setting: Setting, rows: Lengths, vocabulary: int, prefix: int, *, shared: bool) -> list[Request]:
    random = setting.generator(f"prompts {prefix} {shared}")
    random = torch.Generator().manual_seed(random.initial_seed())

    def text(count: int) -> list[int]:
        return torch.randint(0, vocabulary, (count,), generator=random).tolist()

    common = text(prefix)
    return [
        greedy(f"{number}", [*(common if shared else text(prefix)), *text(prompt)], answer)
        for number, (prompt, answer) in enumerate(rows)
    ]


def theirs(setting: Setting, findings: Findings, shape: Shape) -> None:
    """Of transformers, by the same rows; facts: its output tokens/s."""
    rows = table(setting)
    requests = prompts(setting, rows, shape.config.vocab_size, 0, shared=False)
    found = batched(setting, shape.config, [list(r.prompt_token_ids) for r in requests], [a for _, a in rows])
    name = f"{shape.name}, transformers' continuous batching"
    findings.figures.append(Figure(name, found.tokens_a_second, "tok/s", detail=found.detail))
    findings.facts[f"theirs, {shape.name}"] = found.tokens_a_second


def ours(setting: Setting, findings: Findings, shape: Shape) -> None:
    dtype = torch.float32 if setting.dry else torch.bfloat16
    options = {"dtype": str(dtype).removeprefix("torch.")}
    if setting.dry:
        options |= {"num_blocks": 24, "max_num_tokens": 16, "max_num_seqs": 2}
    else:
        # All rows at once, as the roofline has it; a context that no row outgrows.
        options |= {"max_num_seqs": 1024, "context": 4096}
    random = setting.generator(f"weights of {shape.name}")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        checkpoint = random_model(shape.record(), dtype, random, Path(folder))
        started = time.monotonic()
        with on_card(setting, Path(folder), checkpoint, **options) as engine:
            findings.facts[f"start, {shape.name}"] = round(time.monotonic() - started, 2)
            if setting.wants(f"{shape.name}, rows"):
                _throughput(setting, shape, engine, findings)
            # Once is enough in a rehearsal, where it takes longest.
            if setting.wants(f"{shape.name}, prefix") and (shape.marked or not setting.dry):
                _sharing(setting, shape, engine, findings)
            assert isinstance(engine.runner, CardRunner)
            findings.facts[f"steps, {shape.name}"] = asdict(engine.runner.stats)


def their_llama(setting: Setting, findings: Findings) -> None:
    theirs(setting, findings, llama(setting))


def their_qwen(setting: Setting, findings: Findings) -> None:
    theirs(setting, findings, qwen(setting))


def our_llama(setting: Setting, findings: Findings) -> None:
    ours(setting, findings, llama(setting))


def our_qwen(setting: Setting, findings: Findings) -> None:
    ours(setting, findings, qwen(setting))


@dataclass(slots=True)
class Run:
    seconds: float
    tokens: int
    gaps: Gaps
    cached: int

    @property
    def tokens_a_second(self) -> float:
        return self.tokens / self.seconds


def timed(setting: Setting, engine: Engine, requests: Sequence[Request], rows: Lengths) -> Run:
    """Raises RuntimeError where a row did not get its tokens."""
    cached = engine.metrics().cached_tokens
    synchronize(setting.device)
    with gaps_between_graphs(setting) as gaps:
        started = time.perf_counter()
        found = answers(_Marked(engine, gaps), requests)  # type: ignore[arg-type]
        synchronize(setting.device)
        seconds = time.perf_counter() - started
    for request, (_, answer) in zip(requests, rows, strict=True):
        if len(found[request.request_id].token_ids) != answer:
            raise RuntimeError(
                f"row {request.request_id} has {len(found[request.request_id].token_ids)} tokens"
            )
    tokens = sum(answer for _, answer in rows)
    return Run(seconds, tokens, gaps, engine.metrics().cached_tokens - cached)


def _throughput(setting: Setting, shape: Shape, engine: Engine, findings: Findings) -> None:
    rows, vocabulary = table(setting), shape.config.vocab_size
    warm = prompts(setting, rows[: len(rows) // 10 + 1], vocabulary, BLOCK, shared=False)
    if not setting.dry:
        answers(engine, [Request(f"warm {r.request_id}", r.prompt_token_ids, r.sampling) for r in warm])
    run = timed(setting, engine, prompts(setting, rows, vocabulary, 0, shared=False), rows)
    findings.checks.append(Check(f"{shape.name}: every row has its tokens", True))
    name = f"{shape.name}, {len(rows)} rows"
    load, rates = load_of(shape.spec()), rates_of(setting)
    other = setting.facts.get(f"theirs, {shape.name}")
    speed = run.tokens_a_second
    share = run.tokens and rates and least_seconds(load, rates, rows) / run.seconds
    mark = (lambda value: value) if shape.marked else (lambda value: None)
    findings.figures.append(
        Figure(name, speed, "tok/s", "the roofline", share or None, mark(ROOFLINE_MARK), ms=1e3 * run.seconds)
    )
    if rates:
        parts = prefill_seconds(load, rates, rows), decode_seconds(load, rates, rows)
        text = f"prompts {parts[0]:.2f} s, answers {parts[1]:.2f} s at least"
        limit = sum(answer for _, answer in rows) / sum(parts)
        findings.figures.append(Figure("  its roofline", limit, "tok/s", detail=text))
    if other:
        findings.figures.append(
            Figure("  beside transformers", other, "tok/s", "its speed", speed / other, mark(THEIRS_MARK))
        )
    findings.figures += _gap_figures(setting, shape, run.gaps)


def _gap_figures(setting: Setting, shape: Shape, gaps: Gaps) -> Iterator[Figure]:
    idle, busy, steps = gaps.sums()
    if not steps:
        if not setting.dry:
            yield Figure("  host gap between decode steps", 0.0, "ms", detail="none: no two graphs in a row")
        return
    name = f"  host gap between {steps} decode steps"
    share = idle / (idle + busy)
    yield Figure(
        name,
        idle / steps,
        "ms",
        "the step",
        share,
        GAP_MARK if shape.marked else None,
        at_most=True,
        ms=busy / steps,
    )


def _sharing(setting: Setting, shape: Shape, engine: Engine, findings: Findings) -> None:
    rows, vocabulary = table(setting), shape.config.vocab_size
    prefix = prefix_of(rows)
    longer = [(prompt + prefix, answer) for prompt, answer in rows]
    speeds = {}
    for shared in (False, True):
        run = timed(setting, engine, prompts(setting, rows, vocabulary, prefix, shared=shared), longer)
        speeds[shared] = run.tokens_a_second
        if shared and run.cached < prefix * (len(rows) - 1) // 2:
            findings.checks.append(
                Check(
                    f"{shape.name}: a shared prefix is computed once",
                    False,
                    None,
                    f"{run.cached} tokens cached",
                )
            )
        rates = rates_of(setting)
        least = (
            least_seconds(load_of(shape.spec()), rates, longer, prefix if shared else 0) if rates else None
        )
        whose = "one prefix" if shared else "each its own prefix"
        findings.figures.append(
            Figure(
                f"{shape.name}, {whose} of {prefix} tokens",
                run.tokens_a_second,
                "tok/s",
                "the roofline",
                least / run.seconds if least else None,
                ms=1e3 * run.seconds,
            )
        )
    mark = SHARED_MARK if shape.marked else None
    gain = speeds[True] / speeds[False]
    findings.figures.append(Figure("  what sharing is worth", gain, "x", "its own speed", gain, mark))


def rates_of(setting: Setting) -> Rates | None:
    """None where the ceilings were not measured in this run."""
    copy, peak = setting.facts.get("copy"), setting.facts.get("bf16")
    return Rates(copy, peak) if copy and peak else None


@dataclass(slots=True)
class Gaps:
    """Events around each replay of a graph, and the engine's step in which it was."""

    step: int = 0
    replays: list[tuple[int, Any, Any]] = field(default_factory=list)

    def sums(self) -> tuple[float, float, int]:
        """Milliseconds in which the device did nothing between a graph and that of the next step, in which it
        worked on these, and how many there were. Steps with prompts in them run without a graph."""
        counts: dict[int, int] = {}
        for step, _, _ in self.replays:
            counts[step] = counts.get(step, 0) + 1
        idle = busy = 0.0
        steps = 0
        for (step, _, end), (following, start, last) in zip(self.replays, self.replays[1:], strict=False):
            if following == step + 1 and counts[step] == counts[following] == 1:
                idle += end.elapsed_time(start)
                busy += start.elapsed_time(last)
                steps += 1
        return idle, busy, steps


class _Marked:
    """An engine whose steps are counted."""

    def __init__(self, engine: Engine, gaps: Gaps) -> None:
        self._engine, self._gaps = engine, gaps

    def run(self, requests: Sequence[Request]) -> Iterator[Any]:
        for request in requests:
            self._engine.add(request)
        while self._engine.has_work:
            self._gaps.step += 1
            yield from self._engine.step()


@contextmanager
def gaps_between_graphs(setting: Setting) -> Iterator[Gaps]:
    """Puts events before and behind each graph that is replayed meanwhile."""
    gaps = Gaps()
    if setting.device.type != "cuda":
        yield gaps
        return
    replay = torch.cuda.CUDAGraph.replay

    def between_events(graph: torch.cuda.CUDAGraph) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay(graph)
        end.record()
        gaps.replays.append((gaps.step, start, end))

    torch.cuda.CUDAGraph.replay = between_events  # type: ignore[method-assign]
    try:
        yield gaps
        torch.cuda.synchronize()
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
