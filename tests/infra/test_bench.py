"""The benchmark: the same prompts every time, the same arithmetic as on paper, and numbers that fit together.

Nothing here looks at a clock: speeds are for machines on which nothing else runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pagemill.engine.batch import Batch, ReadResult, StepResult
from pagemill.engine.config import ModelInfo, SchedulerConfig
from pagemill.engine.engine import Engine
from pagemill.engine.tokenizer import Tokenizer
from pagemill.engine.weights.load import open_checkpoint

BENCH = Path(__file__).parents[2] / "infra" / "bench"
NAMES = (
    "advantages",
    "compare",
    "contenders",
    "convert",
    "engine",
    "limits",
    "measure",
    "peers",
    "reference",
    "roofline",
    "shape",
    "waiting",
    "workloads",
)
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# W4 under the text of Python 3.11.7.
CORPUS = "32a3364906a7c76cbe607d9dea712d0b8d2bbab987a87063ffc8e2a15d56f9d5"
W4_LINES = "b293e30cf476ba1ed585b07ca539a6e15ad2dbf4221185815108841b5041f340"


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, ModuleType]]:
    """The scripts as modules. They find one another beside themselves, as when one is run."""
    import importlib

    before = set(sys.modules)
    sys.path.insert(0, str(BENCH))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(BENCH))
        for name in set(sys.modules) - before:
            if name in NAMES:
                del sys.modules[name]


@pytest.fixture(scope="module")
def model() -> Path:
    named = os.environ.get("PAGEMILL_DEMO_MODEL")
    path = Path(named) if named else Path(__file__).parents[2] / "models" / DEMO_FILE
    if not path.is_file():
        pytest.skip(f"no demo model at {path}: infra/test fetches it, PAGEMILL_DEMO_MODEL may name it")
    return path


def items(bench: dict[str, ModuleType], *rows: tuple[int, int], start: int = 0) -> list[Any]:
    """Rows of (prompt tokens, output tokens); prompts all begin alike."""
    make = bench["workloads"].Item
    return [make(f"r{i}", tuple(range(start, start + p)), n) for i, (p, n) in enumerate(rows)]


def stored(folder: Path, rows: list[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    listed = [{"id": r.id, "prompt": list(r.prompt), "max_tokens": r.max_tokens} for r in rows]
    for name in ("W1", "W2", "W3", "W4"):
        (folder / f"{name}.tok.json").write_text(json.dumps(listed))
    (folder / "manifest.json").write_text("{}")
    return folder


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


# The workloads


def test_a_workload_is_the_same_every_time(bench: dict[str, ModuleType], model: Path) -> None:
    workloads, tokenizer = bench["workloads"], Tokenizer.from_path(model)
    drafts = workloads.draw("W4", tokenizer)
    assert drafts == workloads.draw("W4", tokenizer)
    assert drafts != workloads.draw("W4", tokenizer, seed=1)
    lengths = [len(tokenizer.render_chat(draft.messages)) for draft in drafts]
    assert len(lengths) == 128
    assert {draft.max_tokens for draft in drafts} == {256}
    assert max(map(abs, (length - 32 for length in lengths))) <= 2
    text = " ".join(workloads.corpus())
    if hashlib.sha256(text.encode()).hexdigest() == CORPUS:
        lines = "".join(workloads.batch_line(f"W4-{i:04d}", d) + "\n" for i, d in enumerate(drafts))
        assert hashlib.sha256(lines.encode()).hexdigest() == W4_LINES


def test_a_workload_is_cut_by_rows_and_by_tokens(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    rows = items(bench, (20, 5), (30, 50), (40, 9))
    folder = stored(tmp_path / "w", rows)
    read = bench["workloads"].read
    assert read(folder, "W1") == rows
    assert [(r.id, r.max_tokens) for r in read(folder, "W1", 2, 8)] == [("r0", 5), ("r1", 8)]


def test_warm_up_rows_begin_like_no_other(bench: dict[str, ModuleType]) -> None:
    rows = bench["workloads"].warm_up(4)
    assert len({row.prompt[:16] for row in rows}) == 4
    assert bench["peers"].shared_prefix(rows) == ()


# The limit


def test_the_limit_is_the_arithmetic_on_paper(bench: dict[str, ModuleType]) -> None:
    roofline = bench["roofline"]
    shape = bench["shape"].Shape(
        layers=2, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4, vocabulary=100
    )
    # qkv 8 x 16, o 8 x 8, gate and up 8 x 32, down 16 x 8
    assert shape.layer_weights == 2 * (128 + 64 + 256 + 128)
    assert (shape.head_weights, shape.kv_numbers) == (800, 16)
    work = roofline.work_of(items(bench, (3, 2)))
    assert (work.prompt, work.distinct, work.output, work.decoded) == (3, 3, 2, 1)
    # Prompt tokens look at 0, 1 and 2 before them, the decoded ones at 3 and 4.
    assert (work.context_sum, work.reads) == (10, 7)
    rates = roofline.Rates(products=1e-9, attention=1e-9, memory=1e-9)  # one operation and one byte a second
    least = roofline.floor(work, shape, rates, batch=1)
    assert least.arithmetic == pytest.approx(2 * 1152 * 4 + 2 * 800 * 2 + 4 * 2 * 2 * 4 * 10)
    assert least.memory == pytest.approx(2 * (1152 + 800) * 1 + 2 * 16 * 7)
    assert least.seconds == max(least.arithmetic, least.memory)


def test_the_limit_counts_a_shared_prefix_once(bench: dict[str, ModuleType]) -> None:
    work_of = bench["roofline"].work_of
    rows = items(bench, (40, 1), (40, 1), (33, 1))
    # Two blocks are common; a prompt that ends with its last shared block computes one token at least.
    assert work_of(rows).distinct == 40 + 8 + 1
    assert work_of(rows, share=False).distinct == work_of(rows).prompt == 113
    assert work_of(items(bench, (32, 1), (32, 1))).distinct == 32 + 16
    assert work_of([*items(bench, (40, 1)), *items(bench, (40, 1), start=1)]).distinct == 80


def test_the_known_limit_of_the_demo_model(bench: dict[str, ModuleType], model: Path) -> None:
    shape = bench["shape"].Shape()
    assert bench["shape"].shape_of(model) == shape
    assert shape.layer_weights == 106_168_320
    assert shape.head_weights == 28_311_552
    assert 2 * shape.kv_numbers == 23_040  # bytes a token in bfloat16


def test_a_share_of_the_limit(bench: dict[str, ModuleType]) -> None:
    roofline, shape = bench["roofline"], bench["shape"].Shape()
    limits = {
        "peak_gflops": {"float32": 100.0, "int8": 200.0},
        "bandwidth_gb_per_s": 1e9,
        "step_ms": {
            "float32 plain": {"1": {"layers": 10.0, "head": 4.0}, "3": {"layers": 30.0, "head": 6.0}},
            "float32 prepacked": {"1": {"layers": 8.0, "head": 5.0}, "3": {"layers": 12.0, "head": 6.0}},
            "int8 prepacked": {"error": "no such instruction"},
        },
    }
    work = roofline.work_of(items(bench, (3, 4), start=0))
    rates = roofline.rates_of(limits, "int8", "float32")
    assert (rates.products, rates.attention, rates.weight_bytes, rates.kv_bytes) == (200.0, 100.0, 1, 4)
    # At two rows, midway: layers 10 ms, head 5 ms. Prompts go at the largest size.
    each = 3 * (12.0 / 3) + 3 * (10.0 / 2) + 4 * (5.0 / 2)
    assert roofline.ceiling(work, limits, "float32", 2) == pytest.approx(4 / each * 1e3)
    assert roofline.ceiling(work, limits, "int8", 2) is None
    with pytest.raises(ValueError, match="no rate for bfloat16"):
        roofline.rates_of(limits, "bfloat16", "bfloat16")
    limit = 4 / roofline.floor(work, shape, roofline.rates_of(limits, "float32", "float32"), 64).seconds
    record = {"settings": {"dtype": "float32", "max_num_seqs": 2}, "output_tokens_per_second": limit / 2}
    found = roofline.against(record, work, shape, limits)
    assert found["share_of_limit"] == 0.5
    assert found["limit"] == pytest.approx(limit, rel=1e-2)


def test_limits_of_a_small_model(bench: dict[str, ModuleType]) -> None:
    shape = bench["shape"].Shape(1, 32, 64, 2, 1, 16, 64)
    found = bench["limits"].measure_all(shape, ["float32", "int8"], [1, 4], 0.0, [1, 2])
    assert found["peak_gflops"]["float32"] > 0
    assert found["bandwidth_gb_per_s"] > 0
    passes = found["step_ms"]["float32 prepacked"]
    assert set(passes) == {"1", "4"}
    assert all(part > 0 for by in passes.values() for part in by.values())
    assert "error" in found["step_ms"]["int8 dynamic"] or found["step_ms"]["int8 dynamic"]["4"]["head"] > 0


# Right and wrong tokens


def test_tokens_are_compared_as_far_as_they_go(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    known = {
        "manifest": {"workloads": {"W1": {"tok_sha256": "d"}}},
        "workloads": {"W1": {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8], "c": [9]}},
        "margins": {"W1": {"a": [9, 9, 9, 9], "b": [1, 0.25, 1, 1], "c": [1]}},
    }
    path.write_text(json.dumps(known))
    compare = bench["reference"].compare
    found = compare({"a": [1, 2], "b": [5, 0, 7, 8], "z": [1]}, path, "W1", "d")
    assert (found["rows"], found["exact"]) == (2, 1)
    assert found["mean_agreeing_prefix"] == 0.625
    assert found["largest_margin_at_first_difference"] == 0.25
    with pytest.raises(ValueError, match="of another W1"):
        compare({}, path, "W1", "e")


# Side by side


def record(
    name: str, speed: float, others: float = 0.0, *, ours: bool = True, kind: str = "float32"
) -> dict[str, Any]:
    return {
        "name": name,
        "ours": ours,
        "kind": kind,
        "workload": "W1",
        "output_tokens_per_second": speed,
        "other_cores": others,
        "peak_rss_mb": 100.0,
        "first_token_seconds": speed / 10,
        "settings": {"dtype": "float32"},
    }


def test_medians_leave_out_disturbed_runs(bench: dict[str, ModuleType]) -> None:
    median_of = bench["compare"].median_of
    found = median_of([record("a", 100.0), record("a", 50.0, 0.9), record("a", 110.0)])
    assert (found["output_tokens_per_second"], found["disturbed"]) == (105.0, 1)
    assert (found["first_start_seconds"], found["start_seconds"]) == (10.0, 8.0)
    assert median_of([record("a", 50.0, 0.9)])["output_tokens_per_second"] == 50.0


def test_ours_are_set_against_the_best_of_the_others(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    compare = bench["compare"]
    done = [
        record("mine", 120.0),
        record("slow", 60.0, ours=False),
        record("fast", 80.0, ours=False),
        record("eight bits", 150.0, ours=False, kind="int8"),
        {"name": "broken", "ours": False, "kind": "float32", "round": 1, "error": "It fell over."},
    ]
    found = compare.summary(done, tmp_path, None)
    assert found["W1"]["mine"]["against"] == {"slow": 2.0, "fast": 1.5, "eight bits": 0.8}
    said = compare.lines(found, done, "float32")
    assert "mine / best float32 peer:  1.50x" in said
    assert "mine / best int8 peer:  0.80x" in said
    assert any(line.startswith("broken") and line.endswith("It fell over.") for line in said)


# The model for others


def test_the_converted_model_is_the_same(bench: dict[str, ModuleType], model: Path, tmp_path: Path) -> None:
    bench["convert"].convert(model, tmp_path, "bfloat16")
    ours, theirs = open_checkpoint(model), open_checkpoint(tmp_path)
    assert bench["shape"].shape_of(tmp_path) == bench["shape"].shape_of(model)
    assert {ours.name_of(name) for name in theirs.files.shapes} == set(ours.files.shapes)
    for name in ("model.layers.3.self_attn.q_proj.weight", "model.layers.29.mlp.down_proj.weight"):
        weight = ours.restore(name, ours.files.read(ours.name_of(name)))
        assert torch.equal(theirs.files.read(name), weight.bfloat16())
    # Digits one by one, which the file's own reader in transformers forgets, and the same chats.
    tokenizer, other = Tokenizer.from_path(model), Tokenizer.from_path(tmp_path)
    chat = bench["workloads"].chat("In 2024, 1,000 of them.")
    assert other.render_chat(chat) == tokenizer.render_chat(chat)
    assert other.eos_token_ids == tokenizer.eos_token_ids


# Our engine


def test_the_engine_runs_a_workload_cut_short(
    bench: dict[str, ModuleType], model: Path, tmp_path: Path
) -> None:
    rows = [bench["workloads"].Item(f"r{i}", tuple(range(900, 940)), 30) for i in range(5)]
    folder = stored(tmp_path / "w", rows)
    words = [str(BENCH / "engine.py"), "--workload", "W1", "--workloads", str(folder), "--model", str(model)]
    words += [
        "--dtype",
        "float32",
        "--kv-cache-gb",
        "0.1",
        "--threads",
        "1",
        "--rows",
        "3",
        "--max-tokens",
        "4",
    ]
    words += ["--set", "max_num_seqs=2", "--json", "r.json", "--outputs", "o.json"]
    # The three rows are alike. That two of them need not run at all is for another test: here they find the
    # blocks of the first.
    words += ["--set", "identical_rows=false"]
    done = run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["rows"], found["output_tokens"], found["prompt_tokens"]) == (3, 12, 120)
    assert found["identical_rows"] == 0
    assert found["cached_tokens"] == 64  # two of three rows find two whole blocks of the first
    speed, seconds = found["output_tokens_per_second"], found["seconds"]
    assert speed == pytest.approx(12 / seconds, rel=0.01)
    assert found["total_tokens_per_second"] == pytest.approx(132 / seconds, rel=0.01)
    assert found["settings"]["max_num_seqs"] == 2
    assert found["settings"]["dtype"] == "float32"
    assert found["first_token_seconds"] >= found["load_seconds"] > 0
    assert set(found["step_seconds"]) == {"schedule", "prepare", "forward", "sample", "finish"}
    assert 0 < sum(found["step_seconds"].values()) <= seconds
    assert found["peak_rss_mb"] > 500
    assert str(tmp_path) not in json.dumps(found)
    outputs = json.loads((tmp_path / "o.json").read_text())
    assert {len(tokens) for tokens in outputs.values()} == {4}
    assert len({tuple(tokens) for tokens in outputs.values()}) == 1


def test_a_setting_that_the_engine_lacks_is_refused(bench: dict[str, ModuleType]) -> None:
    engine = bench["engine"]
    words = ["--workload", "W1", "--json", "x", "--threads", "1", "--no-prefix-cache"]
    _, options = engine.arguments(words)
    assert engine.settings(options)["prefix_cache"] is False
    _, options = engine.arguments([*words, "--set", "sails=3"])
    with pytest.raises(ValueError, match="This engine has no sails; it has"):
        engine.settings(options)


# What the engine has over a server


class Obedient:
    """A runner that computes nothing: a row's next token is 1, or its stop token from `min_tokens` on."""

    depth = 0

    def begin(self, batch: Batch) -> ReadResult:
        tokens: list[int | None] = []
        for i, seq in enumerate(batch.sequences):
            sampling = seq.request.sampling
            ends = sampling.stop_token_ids and seq.num_output_tokens + 1 >= sampling.min_tokens
            token = sampling.stop_token_ids[0] if ends else 1
            tokens.append(token if batch.samples(i) else None)
        count = len(tokens)
        result = StepResult(tuple(tokens), (True,) * count, (None,) * count)
        return lambda: result


@pytest.mark.parametrize(
    ("switch", "figure", "least"),
    [
        ("prefix_cache", "computed_tokens", 5.0),
        ("prefix_order", "computed_tokens", 1.5),
        ("identical_rows", "computed_tokens", 3.5),
        ("long_rows_first", "steps", 1.1),
        ("learned_lengths", "steps", 2.0),
    ],
)
def test_each_advantage_saves_what_its_case_counts(
    bench: dict[str, ModuleType], switch: str, figure: str, least: float
) -> None:
    """The cases of advantages.py over a model that computes nothing: steps and tokens are the same as over
    a real one, as all lengths are fixed."""
    advantages = bench["advantages"]
    (case,) = [case for case in advantages.CASES if case.switch == switch]
    info = ModelInfo("none", "", "", "none", "none", 8192, 50_000, 700, 700 * 16)
    found = {}
    for on in (True, False):
        limits = SchedulerConfig(**{"num_blocks": 700, "context": 8192, **case.settings, switch: on})
        engine = Engine(Obedient(), bench["waiting"].Mute(), info, limits)
        found[on] = advantages.once(engine, case.make(random.Random(1)))
    assert found[False][figure] >= least * found[True][figure]


def test_waiting_rows_all_come_through(bench: dict[str, ModuleType]) -> None:
    assert all(seconds > 0 for seconds in bench["waiting"].once(bench["waiting"].rows_of(96)))
