"""The check for machines with a GPU, rehearsed on a CPU: all of it, each part alone, and faults found.

What starts the command anew does so in an environment from which whatever such a machine may lack is taken.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from gpu_check import lengths, report, roofline
from gpu_check.case import Case, Trial, check
from gpu_check.compare import EXACT, ROUNDED, Tolerance, compare
from gpu_check.fault import Fault
from gpu_check.record import Check, Figure, Findings
from gpu_check.setting import Setting

ROOT = Path(__file__).parents[2]
PARTS = (
    *("kernels", "exactness", "ceilings", "speeds", "attention"),
    *("transformers-llama", "llama", "transformers-qwen", "qwen"),
)
ABSENT = ("numba", "llvmlite", "gguf", "redis", "arq", "boto3", "botocore", "pydantic", "pydantic_core")
# Imported by Python at its start: these modules, and the installed pagemill, are not there.
SITE = f"""
import sys
from importlib.machinery import PathFinder

class WithoutSome:
    invalidate_caches = PathFinder.invalidate_caches
    find_distributions = PathFinder.find_distributions

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {ABSENT!r} else PathFinder.find_spec(name, path, target)

def installed(finder):
    return getattr(finder, "__module__", "").startswith("__editable__")

kept = [finder for finder in sys.meta_path if not installed(finder)]
sys.meta_path[:] = [WithoutSome if finder is PathFinder else finder for finder in kept]
"""


@dataclass(frozen=True)
class Outcome:
    code: int
    text: str
    record: dict[str, Any]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment without what a machine with a GPU may lack."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(SITE)
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def whole(bare: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    path = tmp_path_factory.mktemp("whole") / "made" / "check.json"
    command = [ROOT / "infra" / "gpu-check", "--dry-run", "--json", path]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, cwd=path.parent.parent)
    assert path.exists(), done.stderr[-3000:]
    return Outcome(done.returncode, done.stdout, json.loads(path.read_text()))


def test_the_environment_lacks_what_it_should(bare: dict[str, str]) -> None:
    tries = "\n".join(
        f"try:\n import {name}\n print('{name}')\nexcept ModuleNotFoundError: pass"
        for name in (*ABSENT, "pagemill.engine")
    )
    done = subprocess.run([sys.executable, "-c", tries], env=bare, capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.timeout(600)
def test_all_of_it_is_gone_through_and_nothing_is_wrong(whole: Outcome) -> None:
    assert whole.code == 0, whole.text
    assert whole.record["ok"] is True
    assert tuple(whole.record["parts"]) == PARTS
    for name, part in whole.record["parts"].items():
        assert part["error"] is None, name
        assert part["checks"] or part["figures"], name
        assert all(found["ok"] for found in part["checks"]), name
    assert "0 wrong; 0 parts not done; a rehearsal" in whole.text


@pytest.mark.timeout(600)
def test_every_operation_in_triton_is_checked_and_timed(whole: Outcome) -> None:
    checked = " ".join(found["name"] for found in whole.record["parts"]["kernels"]["checks"])
    for name in (
        *("attention, mixed", "shared prefix", "8-bit memory", "one plan", "rms_norm", "add_rms_norm"),
        *("silu_mul", "gelu_mul", "rope_write", "into int8", "into float8_e4m3fn", "shape_logits"),
        *("row table, inputs", "row table, tokens", "sample", "token_logprobs", "rounded to int8"),
        *("rounded to e4m3", "int8 layer", "e4m3 layer"),
    ):
        assert name in checked
    timed = [figure["name"] for figure in whole.record["parts"]["speeds"]["figures"]]
    for name in (
        "rms_norm",
        "add_rms_norm",
        "silu_mul",
        "rope_write",
        "int8",
        "e4m3",
        "sample",
        "shape_logits",
    ):
        assert any(figure.startswith(name) for figure in timed), name


@pytest.mark.timeout(600)
def test_what_is_promised_stands_beside_what_was_found(whole: Outcome) -> None:
    figures = [figure for part in whole.record["parts"].values() for figure in part["figures"]]
    marks = {figure["name"]: figure["mark"] for figure in figures if figure["mark"] is not None}
    for beginning, mark in (
        ("attention, decode", 0.85),
        ("  beside torch's flash", 0.6),
        ("rms_norm", 0.8),
        ("silu_mul", 0.8),
        ("Llama-3.1-8B, 2 rows", 0.75),
        ("  beside transformers", 3.0),
        ("  what sharing is worth", 1.4),
    ):
        assert mark in [found for name, found in marks.items() if name.startswith(beginning)], beginning
    assert {"command", "seed", "dry", "seconds", "machine"} <= set(whole.record)
    assert whole.record["machine"]["torch"] == torch.__version__
    assert whole.record["parts"]["ceilings"]["facts"]["copy"] > 0


# Runs commands in one process, as each would take seconds to import torch; prints what became of each.
DRIVER = """
import contextlib, io, json, os, pathlib, sys, time
os.environ["TRITON_INTERPRET"] = "1"
from gpu_check.__main__ import _options
from gpu_check.house import named_rooms
with named_rooms():
    from gpu_check import command, run
    from gpu_check.record import Check
    def dies(setting, findings): os._exit(3)
    def hangs(setting, findings):
        findings.checks.append(Check("done before", True))
        time.sleep(600)
    def raises(setting, findings):
        findings.checks.append(Check("done before", True))
        raise ValueError("of its own")
    def sees(setting, findings): findings.facts["seen"] = setting.facts
    def tells(setting, findings): findings.facts["told"] = 7
    parts = {"dies": dies, "hangs": hangs, "raises": raises, "tells": tells, "sees": sees}
    for words in json.loads(sys.argv[1]):
        if words[0] == "odd":
            command.PARTS = tuple(run.Part(name, name, work, 0.05) for name, work in parts.items())
            command.PARTS += (run.Part("ceilings", "none", tells, 1, timed=False),)
            words = words[1:]
        way = command.way_to_start
        if words[0] == "spawned":
            command.way_to_start, words = (lambda dry: "spawn"), words[1:]
        path, out = pathlib.Path(sys.argv[2]), io.StringIO()
        path.unlink(missing_ok=True)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = command.check_this_machine(_options(["--json", str(path), *words]))
        command.way_to_start = way
        record = json.loads(path.read_text()) if path.exists() else {}
        print(json.dumps([code, out.getvalue(), record]), flush=True)
"""
# Parts, and what of them is done. Left out are those that would be the same with other names, and the one
# that takes long even so.
SMALL = {
    "kernels": "rms_norm: 40 fp16",
    "ceilings": "",
    "speeds": "silu_mul",
    "attention": "prefill",
    "transformers-llama": "",
    "llama": "Llama-3.1-8B, rows",
}
FAULTS = {
    "rms_norm: 40 fp16:wrong": ("kernels", "numbers are off"),
    "rms_norm: 40 fp16:unwritten": ("kernels", "were not written"),
    "row table, tokens:unwritten": ("kernels", "numbers are off"),
    "silu_mul:wrong": ("speeds", "numbers are off"),
    "prefill:unwritten": ("attention", "were not written"),
}


def _fault_words(fault: str) -> list[str]:
    return ["--dry-run", "--part", FAULTS[fault][0], "--only", fault.rpartition(":")[0], "--break", fault]


@pytest.fixture(scope="module")
def driven(bare: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    commands = {part: ["--dry-run", "--part", part, "--only", only] for part, only in SMALL.items()}
    commands |= {fault: _fault_words(fault) for fault in FAULTS}
    commands |= {
        "real": ["--part", "ceilings"],
        "unknown": ["--part", "nothing"],
        "spawned": ["spawned", "--dry-run", "--part", "ceilings"],
        "odd": ["odd", "--dry-run"],
    }
    path = tmp_path_factory.mktemp("driven") / "check.json"
    environment = {**bare, "PYTHONPATH": f"{bare['PYTHONPATH']}:{ROOT / 'infra'}"}
    words = [sys.executable, "-c", DRIVER, json.dumps(list(commands.values())), str(path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(commands), done.stderr[-3000:]
    return {name: Outcome(*json.loads(line)) for name, line in zip(commands, lines, strict=True)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", SMALL)
def test_a_part_runs_alone(driven: dict[str, Outcome], part: str) -> None:
    outcome = driven[part]
    assert outcome.code == 0, outcome.text
    # What is timed needs the ceilings to be compared with.
    assert set(outcome.record["parts"]) == (
        {part} if part in ("kernels", "exactness") else {part, "ceilings"}
    )
    found = outcome.record["parts"][part]
    assert found["checks"] or found["figures"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_is_found_and_named(driven: dict[str, Outcome], fault: str) -> None:
    part, words = FAULTS[fault]
    outcome, name = driven[fault], fault.rpartition(":")[0]
    assert outcome.code == 1
    assert outcome.record["ok"] is False
    lines = [line for line in outcome.text.splitlines() if line.startswith("  WRONG")]
    assert lines
    assert all(name in line and words in line for line in lines)
    assert not any(figure["name"].startswith(name) for figure in outcome.record["parts"][part]["figures"])


@pytest.mark.timeout(600)
def test_a_part_that_fails_dies_or_hangs_keeps_no_other_from_running(driven: dict[str, Outcome]) -> None:
    outcome = driven["odd"]
    assert outcome.code == 1
    parts = outcome.record["parts"]
    assert "left nothing" in parts["dies"]["error"]
    assert "its time was up" in parts["hangs"]["error"]
    assert "of its own" in parts["raises"]["error"]
    assert [found["name"] for found in parts["hangs"]["checks"] + parts["raises"]["checks"]] == [
        "done before"
    ] * 2
    assert parts["sees"]["error"] is None
    assert parts["sees"]["facts"]["seen"]["told"] == 7
    assert "3 parts not done (dies, hangs, raises)" in outcome.text


@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card, on which it would run")
def test_without_a_card_the_real_run_says_so(driven: dict[str, Outcome]) -> None:
    assert driven["real"].code == 2
    assert "--dry-run goes through everything" in driven["real"].text


@pytest.mark.timeout(600)
def test_where_nothing_can_be_forked_parts_start_anew(driven: dict[str, Outcome]) -> None:
    outcome = driven["spawned"]
    assert outcome.code == 0, outcome.text
    assert outcome.record["parts"]["ceilings"]["facts"]["copy"] > 0


@pytest.mark.timeout(600)
def test_a_part_that_there_is_not_is_refused(driven: dict[str, Outcome]) -> None:
    assert driven["unknown"].code == 2
    assert "not nothing" in driven["unknown"].text


# Of its own pieces


@triton.jit
def _doubled(x, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count) * 2, mask=at < count)


@pytest.fixture
def setting() -> Setting:
    return Setting(torch.device("cpu"), dry=False, seed=3)


def doubling(count: int) -> Case:
    """Of 20 numbers that it is to double, a kernel does so many."""

    def make(random: torch.Generator) -> Trial:
        x = torch.randn(20, generator=random)

        def run() -> tuple[torch.Tensor]:
            out = torch.empty(20)
            _doubled[(1,)](x, out, count, BLOCK=32)
            return (out,)

        return Trial(run, lambda: (x.double() * 2,), [ROUNDED[torch.float32]])

    return Case("doubling", make)


def test_a_right_kernel_is_right_and_one_that_leaves_numbers_out_is_not(setting: Setting) -> None:
    assert check(doubling(20), setting).ok
    found = check(doubling(19), setting)
    assert not found.ok
    assert "1 of 20 numbers are NaN or were not written" in found.detail


def test_a_kernel_that_gives_other_bits_each_time_is_wrong(setting: Setting) -> None:
    calls: Iterator[int] = iter(range(9))

    def make(random: torch.Generator) -> Trial:
        return Trial(lambda: (torch.ones(4) + 1e-9 * next(calls),), lambda: (torch.ones(4),), [EXACT])

    assert check(Case("even", make), setting).ok  # lost in float32
    near = Tolerance(1e-3, 1e-3, 1e-3)
    drifting = lambda random: Trial(  # noqa: E731
        lambda: (torch.ones(4) + 1e-6 * next(calls),), lambda: (torch.ones(4),), [near]
    )
    found = check(Case("drifting", drifting), setting)
    assert not found.ok
    assert "run again" in found.detail


def test_a_check_that_raises_is_wrong_and_says_where(setting: Setting) -> None:
    def make(random: torch.Generator) -> Trial:
        raise ValueError("no such shape")

    found = check(Case("odd", make), setting)
    assert not found.ok
    assert "ValueError: no such shape (test_gpu_check.py" in found.detail


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[:-1], "its shape"),
        (lambda x: x.index_fill(0, torch.tensor([7]), torch.nan), "not written"),
        (lambda x: x.index_add(0, torch.tensor([7]), torch.tensor([0.2])), "1 of 1000 numbers are off"),
        (lambda x: x.index_fill(0, torch.tensor([7]), torch.inf), "1 of 1000 numbers are off"),
        # Each number is well within its tolerance; all of them together are not.
        (lambda x: x * 1.01, "all together"),
    ],
)
def test_what_is_wrong_is_told_apart(change: Callable[[torch.Tensor], torch.Tensor], words: str) -> None:
    torch.manual_seed(0)
    right = torch.randn(1000)
    assert compare("right", [right], [right.double()], [ROUNDED[torch.bfloat16]]).ok
    found = compare("wrong", [change(right)], [right.double()], [ROUNDED[torch.bfloat16]])
    assert not found.ok
    assert words in found.detail


def test_large_integers_are_compared_to_the_last_bit() -> None:
    right = torch.tensor([2**62 + 1, -3])
    assert compare("same", [right], [right.clone()], [EXACT]).ok
    assert not compare("other", [right], [right - torch.tensor([1, 0])], [EXACT]).ok


@pytest.mark.parametrize("text", ["rms_norm", ":wrong", "rms_norm:odd"])
def test_a_fault_of_no_kind_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a fault is"):
        Fault.parse(text)


def test_the_table_of_lengths_is_what_its_formula_makes() -> None:
    rows = lengths.read()
    assert rows == lengths.table()
    assert len(rows) == 1000
    prompts, answers = ([row[kind] for row in rows] for kind in (0, 1))
    assert abs(mean(prompts) - 220) < 10
    assert abs(mean(answers) - 190) < 10
    assert max(prompts) == max(answers) == 1024
    assert abs(np.corrcoef(prompts, answers)[0, 1]) < 0.1


def test_the_roofline_is_what_one_finds_on_paper() -> None:
    load = roofline.Load(weights=1000, head=100, kv=10, attention=4)
    rates = roofline.Rates(bandwidth=1e3, peak=1e9)
    # Two rows of 5 and 7 tokens with 3 and 2 tokens of answer: two steps, of two rows and of one. Each reads
    # 1,100 numbers of weights, and the keys of all tokens so far: 6 + 8, then 7.
    found = roofline.decode_seconds(load, rates, [(5, 3), (7, 2)])
    assert found == pytest.approx((2 * 2200 + 20 * (6 + 8) + 20 * 7) / 1e3)
    # A prefix of 4 is read once for both.
    shared = roofline.decode_seconds(load, rates, [(5, 3), (7, 2)], shared=4)
    assert found - shared == pytest.approx(20 * 4 / 1e3)
    products = 2 * 1000 * 12 + 2 * 100 * 2 + 4 * (15 + 28)
    assert roofline.prefill_seconds(load, rates, [(5, 3), (7, 2)]) == pytest.approx(products / 1e9)
    # With weights and keys for nothing, the products are what is left.
    fast = replace(rates, bandwidth=1e30)
    assert roofline.decode_seconds(load, fast, [(5, 2)]) == pytest.approx((2 * 1100 + 4 * 6) / 1e9)


def test_the_table_says_what_is_met_and_what_is_below() -> None:
    findings = Findings(
        [Check("fine", True, 0.4), Check("broken", False, None, "it is off")],
        [
            Figure("fast", 3.0, "TB/s", "copy", 0.9, 0.85, ms=0.1),
            Figure("slow", 2.0, "TB/s", "copy", 0.7, 0.85, ms=0.2),
            Figure("gap", 0.1, "ms", "the step", 0.01, 0.03, at_most=True),
        ],
    )
    lines = report.table({"part": findings}, {"part": "A part"}, dry=False).splitlines()
    text = {name: next(line for line in lines if name in line) for name in ("broken", "fast", "slow", "gap")}
    assert "WRONG" in text["broken"]
    assert "it is off" in text["broken"]
    assert "90.0 % of copy [at least 85 %: met]" in text["fast"]
    assert "70.0 % of copy [at least 85 %: BELOW]" in text["slow"]
    assert "[at most 3 %: met]" in text["gap"]
    assert lines[-1] == "2 checks, 1 wrong; 0 parts not done; 2 of 3 marks met"
    assert Findings.read(json.loads(json.dumps(findings.record()))) == findings
