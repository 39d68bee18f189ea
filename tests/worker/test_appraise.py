"""What a model says of a file that is not run: its rows' own faults, and what they would take."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from pagemill.engine.run.preview import Sizes
from pagemill.jobs.cli import main
from pagemill.jobs.row import Row
from pagemill.worker.appraise import Speeds, appraise, run_seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def row(prompt: str | list[int], **params: int) -> Row:
    ids = prompt if isinstance(prompt, list) else None
    text = prompt if isinstance(prompt, str) else None
    return Row(0, 1, "row-0", "completion", None, text, ids, dict(params), 0)


def test_rows_are_counted_by_their_tokens(model: Path) -> None:
    found = appraise(str(model), 64, None)
    assert found.check(row([1] * 10, max_tokens=4)) is None
    assert found.check(row([1] * 20, max_tokens=8, n=2)) is None
    fault = found.check(row([1] * 64))
    assert fault is not None
    assert fault.code == "prompt_too_long"
    estimate = found.estimate()
    assert (estimate.rows, estimate.prompt_tokens, estimate.longest_prompt) == (2, 30, 20)
    assert (estimate.expected_completion_tokens, estimate.most_completion_tokens) == (20, 20)
    assert estimate.longest_row == 28
    assert estimate.kv_bytes_longest_row == 28 * estimate.kv_bytes_all_at_once // (64 * 25)
    assert estimate.rows_at_once == 2
    assert estimate.seconds is not None
    assert estimate.seconds > 0


def test_a_given_rate_decides_the_time(model: Path) -> None:
    found = appraise(str(model), 64, 10.0)
    found.check(row([1] * 10, max_tokens=40))
    assert (found.estimate().seconds, found.estimate().most_seconds) == (4.0, 4.0)


def test_the_time_is_the_roofline() -> None:
    sizes = Sizes(parameters=1000, file_bytes=0, weight_bytes=4000, kv_token_bytes=1, step_bytes=0,
                  available_bytes=None, own_context=10)  # fmt: skip
    reading = Speeds(operations_per_second=1e12, bytes_per_second=400.0)
    assert run_seconds(sizes, 0, 100, 10, reading) == pytest.approx(100 / 10 * 10)
    multiplying = dataclasses.replace(reading, operations_per_second=2000.0, bytes_per_second=1e12)
    assert run_seconds(sizes, 7, 100, 10, multiplying) == pytest.approx(7 + 100)


def test_the_command_asks_the_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "in.jsonl"
    lines = [{"prompt": [1, 2, 3], "max_tokens": 5}, {"prompt": [1] * 99}, {"prompt": 5}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["validate", str(file), "--model", str(model), "--context", "64", "--tokens-per-second", "5"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "prompt_too_long: line 2" in out
    assert "3 tokens, the longest 3" in out
    assert "about 1.0 s, at most 1.0 s at the given rate" in out
    assert main([*words, "--json"]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["rows"], last["good"], last["estimate"]["prompt_tokens"]) == (3, 1, 3)
    assert main(["validate", str(file), "--model", str(tmp_path / "none")]) == 7
