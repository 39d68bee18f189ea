"""What families beyond Llama need of GGUF tokenizers: pre-tokenizers, and Phi-3's control tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_tokenizers import byte_level, gguf_metadata, sentencepiece

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.weights.gguf_tokenizer import build_tokenizer


def words(pre: str, text: str) -> list[str]:
    """How a pre-tokenizer cuts a text."""
    tokenizer = build_tokenizer(gguf_metadata(byte_level()) | {"tokenizer.ggml.pre": pre})
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("qwen2", ["CamelCase", " don", "'t", " ", "1", "2", "3", "4", "!!\n\n", " x"]),
        ("dbrx", ["CamelCase", " don", "'t", " ", "123", "4", "!!\n\n", " x"]),
        ("gpt-4o", ["Camel", "Case", " don't", " ", "123", "4", "!!\n\n", " x"]),
    ],
)
def test_texts_are_cut_as_the_original_cuts_them(pre: str, expected: list[str]) -> None:
    assert words(pre, "CamelCase don't 1234!!\n\n x") == expected


def test_an_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"pre-tokenizer is 'kimi-k2'; this version knows .*gpt-4o"):
        words("kimi-k2", "")


def phi3(**changes: Any) -> dict[str, Any]:
    metadata = gguf_metadata(sentencepiece()) | {"general.architecture": "phi3"} | changes
    pieces, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    return metadata | {
        "tokenizer.ggml.tokens": [*pieces, "<|user|>", "<|endoftext|>"],
        "tokenizer.ggml.token_type": [*types, 3, 3],
        "tokenizer.ggml.scores": [*scores, -1000.0, -1000.0],
    }


def test_control_tokens_of_phi_3_take_the_newline_behind_them_along() -> None:
    tokenizer = build_tokenizer(phi3())
    user, end = (tokenizer.token_to_id(token) for token in ("<|user|>", "<|endoftext|>"))
    newline = tokenizer.encode("\n", add_special_tokens=False).ids
    assert tokenizer.encode("<|user|>\n", add_special_tokens=False).ids == [user]
    assert tokenizer.encode("<|endoftext|>\n", add_special_tokens=False).ids == [end, *newline]
    of_llama = build_tokenizer(phi3() | {"general.architecture": "llama"})
    assert of_llama.encode("<|user|>\n", add_special_tokens=False).ids == [user, *newline]


def test_a_text_without_a_space_in_front_stays_so() -> None:
    """Gemma's files say that none is added."""
    metadata = gguf_metadata(sentencepiece()) | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = build_tokenizer(metadata)
    ids = tokenizer.encode("Hello  world", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == "Hello  world"
    assert not tokenizer.id_to_token(ids[0]).startswith("▁")
