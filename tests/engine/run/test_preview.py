"""How a model would be run agrees with how it is run, and costs no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_gguf
from tiny_models import save, tiny_llama, tiny_model
from tiny_tokenizers import byte_level
from transformers import GPTNeoXConfig

from pagemill.engine.config import EngineConfig
from pagemill.engine.run import load, preview
from pagemill.engine.run.load import load_model
from pagemill.engine.run.preview import Preview

VOCABULARY = 520


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = save(tiny_llama(vocab_size=VOCABULARY), tmp_path / "tiny")
    byte_level().save_pretrained(path)
    return path


def look(path: Path, **config: Any) -> Preview:
    return preview.preview(EngineConfig(str(path), **({"num_blocks": 20, "dtype": "float32"} | config)))


def test_it_says_what_loading_finds(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = load_model(EngineConfig(str(directory), num_blocks=20, dtype="float32")).info
    monkeypatch.setattr(load, "load_weights", lambda *_: pytest.fail("weights were read"))
    found = look(directory)
    assert (found.runs, found.found.how, found.found.family, found.reason) == (True, "family", "llama", None)
    assert (found.found.architecture, found.dtype) == (info.architecture, info.dtype)
    assert (found.context, found.kv_tokens) == (info.context, info.kv_tokens) == (321, 320)
    assert found.chat_template is True


def test_sizes_are_those_of_the_files_and_of_what_is_kept(directory: Path) -> None:
    sizes = look(directory).sizes
    assert sizes is not None
    weights = directory / "model.safetensors"
    assert (sizes.file_bytes, sizes.own_context) == (weights.stat().st_size, 512)
    assert 0 < sizes.file_bytes - sizes.parameters * 4 < 4096
    assert sizes.weight_bytes == 4 * sizes.parameters
    assert sizes.kv_token_bytes == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, their size, bytes
    small = look(directory, quantization="int8", dtype="bfloat16").sizes
    assert small is not None and small.weight_bytes < sizes.weight_bytes / 2
    assert small.kv_token_bytes == sizes.kv_token_bytes // 2


def test_a_tied_head_is_no_second_tensor_of_the_file_and_a_second_copy_in_memory(tmp_path: Path) -> None:
    path = save(tiny_llama(vocab_size=VOCABULARY, tie_word_embeddings=True), tmp_path)
    byte_level().save_pretrained(path)
    sizes = look(path).sizes
    assert sizes is not None and sizes.weight_bytes == 4 * (sizes.parameters + VOCABULARY * 64)


def test_what_does_not_fit_has_a_reason_and_its_sizes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "model's own is 512" in str(look(directory, context=600).reason)
    monkeypatch.setattr(preview, "available_memory", lambda: 1000)
    found = look(directory)
    assert (found.runs, found.context, found.kv_tokens) == (False, None, None)
    assert found.reason is not None and "the largest context that fits is 0 tokens" in found.reason
    assert found.sizes is not None and found.sizes.available_bytes == 1000


def test_a_model_that_transformers_runs_is_looked_at_too(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    path = save(
        tiny_model(GPTNeoXConfig(vocab_size=VOCABULARY, max_position_embeddings=256, **sizes)), tmp_path
    )
    byte_level(template=None).save_pretrained(path)
    found = look(path)
    assert (found.runs, found.found.how, found.chat_template) == (True, "fallback", False)
    assert found.sizes is not None and found.sizes.step_bytes > 0
    refused = look(path, quantization="int8")
    assert not refused.runs
    assert "quantization int8 needs a family of our own" in str(refused.reason)


def test_refusals_have_their_reasons(directory: Path, tmp_path: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").unlink()
    assert "tokenizer" in str(look(directory).reason)
    values = json.loads((directory / "config.json").read_text()) | {"architectures": ["MambaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(values))
    found = look(directory)
    assert (found.runs, found.found.how, found.sizes) == (False, "refused", None)
    assert "MambaForCausalLM" in str(found.reason)
    assert "no model at" in str(look(tmp_path / "none").reason)


def test_a_gguf_file_is_looked_at_too(tmp_path: Path) -> None:
    found = look(write_gguf(tiny_llama(), tmp_path / "tiny.gguf"))
    assert (found.found.how, found.found.family) == ("family", "llama")
    assert found.sizes is not None and found.sizes.parameters > 0
