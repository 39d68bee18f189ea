"""Rebuilds a model's tokenizer from a GGUF file's metadata.

Two kinds, by `tokenizer.ggml.model`: `gpt2` (byte-level BPE with merges and a named pre-tokenizer) and
`llama` (SentencePiece BPE, whose merges follow from the pieces' scores). The pre-tokenizer's name matters:
SmolLM splits digits one by one, Llama 3 in threes, and the wrong choice gives ids the model never saw. An
unknown name is refused rather than guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagemill.engine.errors import ModelLoadError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTIONS + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTIONS + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Names in `tokenizer.ggml.pre`, by what they stand for.
PLAIN = frozenset({"gpt-2", "phi-2", "olmo", "mpt"})
DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
PATTERNS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
    "gpt-4o": _O200K,
}
# A word that is in the vocabulary is one token, whether or not merges lead to it.
WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})
# These begin a text with BOS unless the file says otherwise.
BEGIN_WITH_BOS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"})


def build_tokenizer(metadata: Mapping[str, Any]) -> Any:
    """A `tokenizers.Tokenizer`; raises ModelLoadError where the metadata do not tell how to tokenise."""
    kind = metadata.get("tokenizer.ggml.model")
    kinds = {"gpt2": _byte_level, "llama": _sentencepiece}
    if not isinstance(kind, str) or kind not in kinds:
        raise ModelLoadError(f"The GGUF tokenizer is of kind {kind!r}; this version reads gpt2 and llama.")
    pieces, types = _pieces(metadata), _types(metadata)
    try:
        tokenizer = kinds[kind](metadata)
        _add_tokens(tokenizer, pieces, types, _swallowing(metadata))
    except ModelLoadError:
        raise
    except (
        Exception
    ) as error:  # the library has one kind for all, such as a merge of pieces that are not there
        raise ModelLoadError(f"The GGUF tokenizer makes no sense: {error}.") from error
    return tokenizer


def begins_with_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether a text begins with the BOS token."""
    stated = metadata.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    return metadata.get("tokenizer.ggml.pre") in BEGIN_WITH_BOS


def token_of(metadata: Mapping[str, Any], role: str) -> int | None:
    """The id of a role such as `bos` or `eos`, None where the file names none."""
    value = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if value is None and metadata.get("tokenizer.ggml.model") == "llama":
        value = {"unknown": 0, "bos": 1, "eos": 2}.get(role)
    return value if isinstance(value, int) and 0 <= value < len(_pieces(metadata)) else None


def template_of(metadata: Mapping[str, Any]) -> str | None:
    """The chat template's source, None where the file has none."""
    template = metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None


def _pieces(metadata: Mapping[str, Any]) -> list[str]:
    pieces = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(pieces, list) or not pieces or not all(isinstance(piece, str) for piece in pieces):
        raise ModelLoadError("The GGUF metadata lack tokenizer.ggml.tokens.")
    return pieces


def _types(metadata: Mapping[str, Any]) -> list[int]:
    pieces = _pieces(metadata)
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [NORMAL] * len(pieces)
    if not isinstance(types, list) or len(types) != len(pieces):
        raise ModelLoadError("The GGUF metadata have not one tokenizer.ggml.token_type for each token.")
    return types


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    pieces = _pieces(metadata)
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        twice = next(piece for index, piece in enumerate(pieces) if vocabulary[piece] != index)
        raise ModelLoadError(f"The GGUF metadata list the token {twice!r} twice.")
    return vocabulary


def _byte_level(metadata: Mapping[str, Any]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre")
    name = name if isinstance(name, str) else None
    split: list[Any] = []
    if name in DIGITS:
        split = [pre_tokenizers.Digits(individual_digits=True)]
    elif name in PATTERNS:
        split = [pre_tokenizers.Split(Regex(PATTERNS[name]), behavior="isolated")]
    elif name not in PLAIN:
        known = ", ".join(sorted({*PLAIN, *DIGITS, *PATTERNS}))
        raise ModelLoadError(f"The GGUF pre-tokenizer is {name!r}; this version knows {known}.")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelLoadError("The GGUF metadata lack tokenizer.ggml.merges.")
    model = models.BPE(
        vocab=_vocabulary(metadata),
        merges=[_pair(merge) for merge in merges],
        ignore_merges=name in WHOLE_WORDS,
    )
    tokenizer = Tokenizer(model)
    if name in PATTERNS and PATTERNS[name] == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    own_pattern = name not in PATTERNS
    split.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    # From the second character on: a piece may itself begin with the separator.
    left, found, right = merge[1:].partition(" ")
    if not found:
        raise ModelLoadError(f"The GGUF merge {merge!r} is not two pieces.")
    return merge[0] + left, right


def _sentencepiece(metadata: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = _vocabulary(metadata)
    unknown = token_of(metadata, "unknown")
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_by_score(metadata, vocabulary),
        unk_token=None if unknown is None else _pieces(metadata)[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace: list[Any] = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(([normalizers.Prepend("▁")] if prefix else []) + replace)
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(undo + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer


def _merges_by_score(metadata: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best piece first: SentencePiece joins the best pair first."""
    scores = metadata.get("tokenizer.ggml.scores")
    types = _types(metadata)
    if not isinstance(scores, list) or len(scores) != len(types):
        raise ModelLoadError("The GGUF metadata have not one tokenizer.ggml.scores for each token.")
    # Only ordinary pieces are joined: no text may grow into a control token.
    usable = {piece for piece, index in vocabulary.items() if types[index] in (NORMAL, USER_DEFINED)}
    merges = [
        (-scores[index], index, cut, piece)
        for piece, index in vocabulary.items()
        if types[index] == NORMAL
        for cut in range(1, len(piece))
        if piece[:cut] in usable and piece[cut:] in usable
    ]
    return [(piece[:cut], piece[cut:]) for _, _, cut, piece in sorted(merges)]


def _swallowing(metadata: Mapping[str, Any]) -> frozenset[str]:
    """Control tokens that take the white space behind them along.

    Phi-3's do, but for a few, and the file has no place to say so: without this the model would see a
    newline behind each turn's role that it never saw in training. llama.cpp goes by the same rule.
    """
    if metadata.get("general.architecture") != "phi3" or metadata.get("tokenizer.ggml.model") != "llama":
        return frozenset()
    pieces = zip(_pieces(metadata), _types(metadata), strict=True)
    return frozenset(p for p, t in pieces if t == CONTROL) - {"<s>", "<|endoftext|>"}


def _add_tokens(tokenizer: Any, pieces: list[str], types: list[int], swallowing: frozenset[str]) -> None:
    """Control tokens are found in text and skipped in output; user-defined ones are found and shown."""
    from tokenizers import AddedToken

    special = {CONTROL, UNKNOWN}
    tokenizer.add_special_tokens(
        [
            AddedToken(p, normalized=False, special=True, rstrip=p in swallowing)
            for p, t in zip(pieces, types, strict=True)
            if t in special
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(p, normalized=False) for p, t in zip(pieces, types, strict=True) if t == USER_DEFINED]
    )
