"""From a model on disk to an engine that answers: a tiny model with everything that a real one brings."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
import torch
from engine_fakes import request, run_all

from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import build_engine
from pagemill.engine.errors import EngineError, ModelLoadError, OutOfMemory

CONTEXT = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers over bytes; two ends in its generation_config, another in its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")  # id 256
    tokenizer.save_pretrained(path)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=256,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    generation = {"eos_token_id": [256, 257], "temperature": 0.6, "do_sample": True}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def config(model: Path, **changes: object) -> EngineConfig:
    settings: dict[str, object] = {"model": str(model), "dtype": "float32", "num_blocks": 32, "threads": 1}
    return EngineConfig(**{**settings, **changes})  # type: ignore[arg-type]


def test_an_engine_is_built_and_answers(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pagemill.engine"):
        engine = build_engine(config(model))
    info = engine.model_info
    assert (info.context, info.num_blocks, info.kv_tokens) == (CONTEXT, 32, 512)
    assert {256, 257} <= info.eos_token_ids
    assert info.generation_defaults["temperature"] == 0.6
    assert len(info.fingerprint) >= 16
    (line,) = [record.message for record in caplog.records if "blocks" in record.message]
    for word in ("LlamaForCausalLM", "float32 on cpu", "32 blocks", "512 tokens", "context 256", "2.0 rows"):
        assert word in line
    ids = engine.tokenizer.encode_prompt("héllo 👍")
    completion = run_all(engine, [request("a", ids, 20, temperature=0.0, ignore_eos=True)])["a"]
    assert completion.text == engine.tokenizer.decode(completion.token_ids)
    assert completion.usage.completion_tokens == 20


@pytest.mark.parametrize("end", [256, 257])
def test_every_end_of_generation_config_ends_a_row(model: Path, end: int) -> None:
    engine = build_engine(config(model))
    pushed = request("a", [1, 2, 3], 50, temperature=0.0, logit_bias=((end, 1e9),))
    completion = run_all(engine, [pushed])["a"]
    assert (completion.finish_reason, completion.token_ids, completion.text) == ("stop", (end,), "")
    held_back = request("b", [1, 2, 3], 50, temperature=0.0, logit_bias=((end, 1e4),), min_tokens=4)
    completion = run_all(engine, [held_back])["b"]
    assert completion.usage.completion_tokens == 5 and end not in completion.token_ids[:4]


def test_the_context_can_be_less_and_never_more(model: Path) -> None:
    engine = build_engine(config(model, context=40))
    done = run_all(engine, [request("long", [1] * 40, 5), request("fits", [1] * 39, 5, ignore_eos=True)])
    assert done["long"].error_code == "prompt_too_long"
    assert done["fits"].usage.completion_tokens == 1
    with pytest.raises(OutOfMemory, match="256"):
        build_engine(config(model, context=CONTEXT + 1))


def test_a_memory_that_is_too_small_says_what_is_needed_and_what_would_fit(model: Path) -> None:
    with pytest.raises(OutOfMemory) as small:
        build_engine(config(model, num_blocks=4, context=200))
    assert "13 blocks" in str(small.value) and "65 tokens" in str(small.value)
    with pytest.raises(OutOfMemory, match="largest context that fits"):
        build_engine(config(model, num_blocks=None, kv_cache_gb=1e-9))
    with pytest.raises(OutOfMemory, match="are free"):
        build_engine(config(model, num_blocks=None, kv_cache_gb=1e6))


def test_a_memory_smaller_than_the_context_shortens_it(model: Path) -> None:
    assert build_engine(config(model, num_blocks=4)).model_info.context == 65


def test_what_is_no_model_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no model at"):
        build_engine(EngineConfig(model=str(tmp_path / "nothing")))
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        build_engine(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    "wrong",
    [{"num_blocks": 0}, {"max_num_tokens": 0}, {"kv_cache_gb": math.inf}, {"dtype": "int3"}, {"context": -5}],
    ids=str,
)
def test_a_setting_that_makes_no_sense_is_refused_in_one_sentence(wrong: dict[str, object]) -> None:
    with pytest.raises(EngineError, match=next(iter(wrong))):
        EngineConfig(model="m", **wrong)  # type: ignore[arg-type]
