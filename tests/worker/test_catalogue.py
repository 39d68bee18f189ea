"""`pagemill models` says how a model would be run, without running it or fetching anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make_tiny_model

from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import build_engine
from pagemill.engine.models.registry import FAMILIES
from pagemill.jobs.cli import main

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def models(capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["models", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def document(answer: tuple[int, str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer[1])
    return found


def test_without_a_model_it_lists_the_families(models: Call) -> None:
    code, out, _ = models()
    assert code == 0
    lines = [line.split("\t") for line in out.splitlines()]
    assert lines[0] == ["family", "covers", "architectures", "loaders"]
    assert [line[0] for line in lines[1:-1]] == [family.name for family in FAMILIES]
    assert lines[1][2:] == ["LlamaForCausalLM,gguf:llama", "safetensors,gguf"]
    assert "Any other causal language model of transformers" in out
    listed = document(models("--json"))
    assert {name for family in listed["families"] for name in family["architectures"]} == {
        name for family in FAMILIES for name in family.architectures
    }
    assert next(f for f in listed["families"] if f["family"] == "mistral")["loaders"] == ["safetensors"]


def test_a_directory_is_said_to_run_as_it_then_does(models: Call, tiny: Path) -> None:
    words = (tiny, "--dtype", "float32", "--kv-cache-gb", 0.01, "--context", 100)
    code, out, err = models(*words)
    assert (code, err) == (0, "")
    assert "by our own decoder, family llama" in out
    assert "chat template  yes" in out
    assert "in 0.01 GiB of keys and values (--kv-cache-gb)" in out
    said = document(models(*words, "--json"))
    info = build_engine(EngineConfig(str(tiny), dtype="float32", kv_cache_gb=0.01, context=100)).model_info
    assert (said["architecture"], said["dtype"]) == (info.architecture, info.dtype)
    assert (said["context"], said["kv_tokens"]) == (info.context, info.kv_tokens)
    assert (said["how"], said["family"], said["runs"]) == ("family", "llama", True)
    assert said["parameters"] * 4 < said["file_bytes"] < said["parameters"] * 4 + 10_000
    assert said["kv_token_bytes"] == 2 * 2 * 2 * 16 * 4


def test_what_would_not_run_ends_with_the_reason(models: Call, tiny: Path) -> None:
    code, out, _ = models(tiny, "--kv-cache-gb", 1e6)
    assert code == 7
    assert "not like this (else by our own decoder, family llama)" in out
    assert "the largest context that fits is 512 tokens" in out
    code, out, _ = models(tiny, "--context", 9999, "--json")
    assert code == 7
    assert "the model's own is 512" in json.loads(out)["reason"]


def test_a_refused_model_ends_with_the_reason(models: Call, tmp_path: Path) -> None:
    values = {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    code, out, _ = models(tmp_path)
    assert code == 7
    assert "not at all" in out
    assert "quantised (awq)" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["./none"], 7, "no model at ./none"),
        (["nobody/nothing"], 7, "its files are not on this machine"),
        (["smollm2", "--dtype", "int4"], 2, "--dtype"),
        (["smollm2", "--kv-cache-gb", "-1"], 2, "--kv-cache-gb"),
    ],
)
def test_what_cannot_be_looked_at_is_one_sentence(
    models: Call, words: list[str], code: int, said: str
) -> None:
    ending, out, err = models(*words)
    assert (ending, out) == (code, "")
    assert said in err
    assert len(err.splitlines()) == 1
