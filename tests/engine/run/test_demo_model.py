"""SmolLM2 from its GGUF file: the tokens of transformers, and sensible English."""

from __future__ import annotations

import pytest
import torch
from demo_model import as_transformers, demo_model
from tiny_models import Driver, greedy, reference_logits, sequence
from transformers import LlamaForCausalLM

from pagemill.engine.config import EngineConfig
from pagemill.engine.run.load import LoadedModel, load_model

NEW_TOKENS = 24
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Translate to French: I would like a cup of coffee, please.",
    "List three uses of copper.",
    "What is 12 + 30? Answer with a number only.",
    "Summarise in one sentence: The meeting was moved from Monday 14:00 to Wednesday 09:30.",
    "Is 'This film was a waste of two hours' positive or negative?",
    "Explain what a hash table is to a child.",
    "Extract the year: The bridge was opened in 1937 after four years of work.",
    "Write a Python function that reverses a string.",
]
TEXTS = [
    "Once upon a time, in a small village at the edge of a forest,",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n",
    "Ingredients:\n- 250 g flour\n- 3 eggs\n-",
    "In 1969, the first humans",
    "The quick brown fox jumps over the lazy dog. " * 12 + "The quick",
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(EngineConfig(str(demo_model()), dtype="float32", kv_cache_gb=0.5))


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return as_transformers(demo_model())


def test_what_it_says_about_itself(loaded: LoadedModel) -> None:
    info = loaded.info
    assert (info.architecture, info.dtype, info.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert (info.vocab_size, info.context, info.eos_token_ids) == (49_152, 8192, frozenset({2}))
    # 0.5 GiB over 30 layers of 3 heads of 64, keys and values in float32: 737,280 bytes a block.
    assert info.num_blocks == 2**29 // 737_280


def test_its_tokenizer_splits_digits(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    digits = [tokenizer.encode_prompt(digit)[0] for digit in "0123456789"]
    assert tokenizer.encode_prompt("2024") == [digits[2], digits[0], digits[2], digits[4]]
    chat = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert chat[0] == 1 and chat.count(2) == 2
    assert "helpful AI assistant named SmolLM" in tokenizer.decode(chat)


def test_greedy_tokens_equal_transformers(loaded: LoadedModel, reference: LlamaForCausalLM) -> None:
    tokenizer = loaded.tokenizer
    ids = [tokenizer.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    ids += [tokenizer.encode_prompt(text) for text in TEXTS]
    driver = Driver(loaded.runner)
    produced = driver.finish([sequence(prompt, greedy(NEW_TOKENS)) for prompt in ids], chunk=64)
    assert "Paris" in tokenizer.decode(produced[0])

    # If every token is transformers' choice given the tokens before it, all are its greedy tokens; and one
    # pass over the whole text shows that.
    for prompt, tokens in zip(ids, produced, strict=True):
        logits = reference_logits(reference, prompt + tokens)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens, tokenizer.decode(prompt)


def test_logits_equal_transformers(loaded: LoadedModel, reference: LlamaForCausalLM) -> None:
    prompt = loaded.tokenizer.encode_prompt(TEXTS[0] + " there lived")
    kept: list[torch.Tensor] = []
    runner = loaded.runner
    head = runner.decoder.logits

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        kept.append(head(hidden))
        return kept[-1].clone()

    runner.decoder.logits = keep  # type: ignore[method-assign]
    try:
        Driver(runner).finish([sequence(prompt, greedy(1))])
    finally:
        runner.decoder.logits = head  # type: ignore[method-assign]
    expected = reference_logits(reference, prompt)[-1]
    torch.testing.assert_close(kept[0][0], expected, rtol=0, atol=1e-4)
