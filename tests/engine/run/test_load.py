"""Building a model from a config: ends, defaults, fingerprint, and reasons when it cannot be."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Driver, greedy, reference_greedy, save, sequence, tiny_llama, tiny_model
from tiny_tokenizers import byte_level
from transformers import GPTNeoXConfig

from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import build_engine
from pagemill.engine.errors import EngineError, ModelLoadError, OutOfMemory
from pagemill.engine.request import Completion, Request, SamplingParams
from pagemill.engine.run import load
from pagemill.engine.run.device import resolve_dtype
from pagemill.engine.run.load import LoadedModel, load_model

VOCABULARY = 520


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = save(tiny_llama(vocab_size=VOCABULARY, eos_token_id=7), tmp_path / "tiny")
    byte_level().save_pretrained(path)
    write(path, "generation_config.json", {})
    return path


def write(directory: Path, name: str, value: dict[str, Any]) -> None:
    (directory / name).write_text(json.dumps(value))


def open_model(directory: Path, **config: Any) -> LoadedModel:
    return load_model(EngineConfig(str(directory), **({"num_blocks": 20, "dtype": "float32"} | config)))


def test_a_directory_becomes_a_model_that_runs(directory: Path) -> None:
    loaded = open_model(directory)
    assert (loaded.info.name, loaded.info.vocab_size) == ("tiny", VOCABULARY)
    assert (loaded.info.num_blocks, loaded.info.kv_tokens, loaded.info.context) == (20, 320, 321)
    prompt = loaded.tokenizer.encode_prompt("Hello")
    assert len(Driver(loaded.runner).finish([sequence(prompt, greedy(5))])[0]) == 5


# Ends


def test_every_source_adds_to_the_ends(directory: Path) -> None:
    # 7 from config.json, 0 from the tokenizer, 2 from the template, 5 and 6 from generation_config.json.
    assert open_model(directory).info.eos_token_ids == {0, 2, 7}
    write(directory, "generation_config.json", {"eos_token_id": [5, 6]})
    assert open_model(directory).info.eos_token_ids == {0, 2, 5, 6, 7}
    write(directory, "generation_config.json", {"eos_token_id": 5})
    assert open_model(directory).info.eos_token_ids == {0, 2, 5, 7}


def test_a_row_stops_at_any_end_that_the_model_names(directory: Path) -> None:
    """Not at the tokenizer's alone: rows would run on to their limit."""

    def run() -> Completion:
        engine = build_engine(EngineConfig(str(directory), num_blocks=20, dtype="float32"))
        (completion,) = engine.run([Request("a", (40, 41, 42), SamplingParams(12, temperature=0.0))])
        return completion

    free = run()
    assert (free.finish_reason, len(free.token_ids)) == ("length", 12)
    for last in (free.token_ids[2], free.token_ids[7]):
        write(directory, "generation_config.json", {"eos_token_id": [VOCABULARY - 1, last]})
        stopped = run()
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None)
        assert stopped.token_ids == free.token_ids[: free.token_ids.index(last) + 1]


def test_an_end_outside_the_vocabulary_is_none(directory: Path) -> None:
    write(directory, "generation_config.json", {"eos_token_id": [5, 10**6, -1, True, None]})
    assert open_model(directory).info.eos_token_ids == {0, 2, 5, 7}


def test_min_tokens_holds_back_all_of_them(directory: Path) -> None:
    assert open_model(directory).runner.sampler.eos_token_ids == open_model(directory).info.eos_token_ids


# Defaults


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, {"temperature": 0.6, "top_p": 0.9, "top_k": 20}),
        ({"temperature": None, "max_length": 5}, {}),
        ({"temperature": 0.6, "do_sample": False}, {"temperature": 0.0}),
        ({"temperature": 0.6, "do_sample": True}, {"temperature": 0.6}),
        ({"repetition_penalty": 1.1, "min_p": 0.05}, {"repetition_penalty": 1.1, "min_p": 0.05}),
    ],
)
def test_the_models_own_sampling_is_told(
    directory: Path, generation: dict[str, Any], expected: dict[str, Any]
) -> None:
    write(directory, "generation_config.json", generation)
    assert open_model(directory).info.generation_defaults == expected


# The fingerprint


def test_the_fingerprint_is_that_of_what_decides_the_tokens(directory: Path) -> None:
    first = open_model(directory).info.fingerprint
    assert open_model(directory, num_blocks=30).info.fingerprint == first
    assert open_model(directory, dtype="bfloat16").info.fingerprint != first
    write(directory, "generation_config.json", {"eos_token_id": 5})
    other = open_model(directory).info.fingerprint
    assert other != first
    weights = directory / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert open_model(directory).info.fingerprint not in (first, other)


# Reasons


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"device": "tpu"}, "device must be auto, cpu, cuda or cuda:N, not 'tpu'"),
        ({"dtype": "float16", "device": "cpu"}, "float16 is not computed on CPU; use float32 or bfloat16"),
        ({"dtype": "int8"}, "dtype must be auto, float32, bfloat16 or float16, not 'int8'"),
        ({"quantization": "int4"}, "quantization must be int8, fp8 or left out, not 'int4'"),
        ({"kv_cache_gb": float("nan")}, "kv_cache_gb must be a number up to 1048576, not nan"),
        ({"threads": 0}, "threads must be at least 1, not 0"),
    ],
)
def test_what_no_model_can_be_run_with_is_refused_before_one_is_looked_at(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EngineError, match=reason):
        EngineConfig("nowhere", **settings)


def test_auto_is_the_widest_type_that_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagemill.engine.run.device._multiplies_bfloat16", lambda: False)
    assert resolve_dtype("auto") == torch.float32
    monkeypatch.setattr("pagemill.engine.run.device._multiplies_bfloat16", lambda: True)
    assert resolve_dtype("auto") == torch.bfloat16
    assert resolve_dtype("float32") == torch.float32


def test_a_context_that_does_not_fit_is_refused_before_weights_are_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(OutOfMemory, match="largest context that fits is 65 tokens"):
        open_model(directory, num_blocks=4, context=300)


def test_too_little_memory_says_how_much_is_missing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "available_memory", lambda: 1000)
    monkeypatch.setattr(load, "load_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(OutOfMemory, match=r"MiB of weights in float32, .* for a step .* 1\.0 KiB are free"):
        open_model(directory)


def test_what_is_gone_when_the_weights_are_read_counts(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([1 << 40, 1 << 10])
    monkeypatch.setattr(load, "available_memory", lambda: next(free))
    with pytest.raises(OutOfMemory, match=r"1\.0 KiB are free") as error:
        open_model(directory)
    assert "weights" not in str(error.value)  # they have their memory already


def test_threads_are_set_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    load.set_threads(3)
    load.set_threads(None)
    assert told == [3, len(os.sched_getaffinity(0))]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    load.set_threads(None)
    assert len(told) == 2


# Families and what is none


def test_a_longrope_model_says_where_its_keys_change(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    path = save(tiny_llama(vocab_size=VOCABULARY, rope_parameters=rope), tmp_path)
    byte_level().save_pretrained(path)
    assert open_model(path).info.rope_switch == 64


def test_a_model_without_a_family_runs_through_transformers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    tiny = tiny_model(GPTNeoXConfig(vocab_size=VOCABULARY, max_position_embeddings=256, **sizes))
    path = save(tiny, tmp_path / "tiny")
    byte_level().save_pretrained(path)
    loaded = open_model(path)
    assert (loaded.info.architecture, loaded.info.context) == ("GPTNeoXForCausalLM", 256)
    prompt = loaded.tokenizer.encode_prompt("Hello")
    assert Driver(loaded.runner).finish([sequence(prompt, greedy(9))]) == [reference_greedy(tiny, prompt, 9)]
    # Without our memory it must not fall back on something else: causality is in how we call it.
    with pytest.raises(TypeError, match="pagemill"):
        loaded.runner.decoder._model(input_ids=torch.tensor([prompt]), use_cache=False)  # type: ignore[attr-defined]
    # What it is called on this machine is no part of what it answers.
    again = shutil.copytree(path, tmp_path / "elsewhere")
    assert open_model(again).info.fingerprint == loaded.info.fingerprint
    with pytest.raises(ModelLoadError, match="quantization int8 needs a family"):
        open_model(path, quantization="int8")


def test_reading_shared_prefixes_together_can_be_switched_off(directory: Path) -> None:
    assert open_model(directory).runner.share_prefixes
    assert not open_model(directory, shared_prefix_attention=False).runner.share_prefixes
