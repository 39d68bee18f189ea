"""Small trained tokenizers of both kinds, as Hugging Face directories and as GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Hello, world! The quick brown fox jumps over the lazy dog 1234567890 times.",
    "What is the capital of France? Paris is the capital of France.",
    "user assistant system im_start im_end end of text",
    "Ünïcödé text, emoji 🙂 and Thai ภาษาไทย and 中文 characters.",
    "def f(x):\n    return x + 1\n\n\tprint(f(2))",
] * 3

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Llama 2's: BOS from the template, content trimmed, the system role folded in or refused.
LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('System role not supported') }}{% endif %}{% endfor %}"
)


def byte_level(template: str | None = CHATML, *, begins_with_bos: bool = False) -> PreTrainedTokenizerFast:
    """As SmolLM's: byte-level BPE, digits one by one, ChatML tokens and one that is added but not special."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=control,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    if begins_with_bos:
        from tokenizers.processors import TemplateProcessing

        bos = backend.token_to_id("<|bos|>")
        backend.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=template,
    )


def sentencepiece(template: str | None = LLAMA2) -> PreTrainedTokenizerFast:
    """As Llama 2's: BPE over ▁ with byte fallback, BOS in front."""
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    # Only while training: pieces within words, as SentencePiece makes them.
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]+"), "isolated")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=pieces, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    state = _without_special_bytes(backend)
    backend = Tokenizer.from_str(state)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


def _without_special_bytes(backend: Tokenizer) -> str:
    import json

    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 3]
    state["pre_tokenizer"] = None
    return json.dumps(state)


def save(tokenizer: PreTrainedTokenizerFast, path: Path) -> Path:
    """A directory as a model's, with a config that names a plain tokenizer class."""
    import json

    tokenizer.save_pretrained(path)
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    return path


def gguf_metadata(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for this tokenizer."""
    import json

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = state["model"]
    added = {token["id"]: token for token in state["added_tokens"]}
    pieces = dict(sorted({index: piece for piece, index in model["vocab"].items()}.items()))
    pieces |= {index: token["content"] for index, token in added.items()}
    types = []
    for index, piece in sorted(pieces.items()):
        if index in added:
            types.append(2 if piece == "<unk>" else 3 if added[index]["special"] else 4)
        else:
            types.append(6 if model.get("byte_fallback") and piece.startswith("<0x") else 1)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if model.get("byte_fallback") else "gpt2",
        "tokenizer.ggml.tokens": [piece for _, piece in sorted(pieces.items())],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
    }
    if tokenizer.chat_template is not None:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    if model.get("byte_fallback"):
        # SentencePiece's scores fall with the order in which pieces were made.
        metadata["tokenizer.ggml.scores"] = [-float(index) for index in sorted(pieces)]
        metadata["tokenizer.ggml.unknown_token_id"] = 0
    else:
        metadata["tokenizer.ggml.pre"] = "smollm"
        metadata["tokenizer.ggml.merges"] = [" ".join(pair) for pair in model["merges"]]
    return metadata | {key.replace("__", "."): value for key, value in changes.items()}
