"""Text to token ids and back, for directories of Hugging Face and for GGUF files.

Knows strings and ids: prompts, chats, control tokens, the ids that end a text. It may not know requests,
weights or the rest of the engine. Everything here is deterministic and safe to call from several threads.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pagemill.engine.chat import ChatTemplate, Guard, Message, TemplateError, plain_messages
from pagemill.engine.errors import ModelLoadError

__all__ = ["SpecialTokens", "TemplateError", "Tokenizer"]

SpecialTokens = Literal["text", "parse", "error"]

# A made-up answer, to see what the template puts behind a turn.
_PROBE = "Pagemillprobe"


@dataclass(frozen=True, slots=True)
class Parts:
    """What a tokenizer is made of, whatever file it came from.

    backend: a `tokenizers.Tokenizer`. variables: what templates see (bos_token, eos_token, ...).
    template: its source, None where the model has none.
    """

    backend: Any
    template: str | None
    variables: Mapping[str, str]
    bos_token_id: int | None
    begins_with_bos: bool
    eos_token_ids: frozenset[int]


class Tokenizer:
    """One model's tokenizer and chat template.

    eos_token_ids: the tokenizer's own end ids, and what its template puts behind an assistant's turn (for
        chat models often another token). The model's generation_config may add more.
    byte_token_ids: ids that stand for single bytes (SentencePiece's <0x0A>).
    """

    def __init__(self, parts: Parts) -> None:
        self._backend = parts.backend
        self._parts = parts
        # Lengths are limits of the engine; a tokenizer that cuts or pads on its own would hide them.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._control = {
            token.content: index
            for index, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._guard = Guard(self._control)
        self._secret = secrets.token_hex(8)
        self._sealed: Any = None
        self._sealing = threading.Lock()
        self._template: ChatTemplate | None = None
        self.byte_token_ids = _byte_token_ids(self._backend)
        self.eos_token_ids = parts.eos_token_ids | self._end_of_turn()

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """Reads the tokenizer of a model; raises ModelLoadError with the reason."""
        path = Path(path)
        return cls(_parts_of_directory(path) if path.is_dir() else _parts_of_gguf(path))

    @property
    def vocab_size(self) -> int:
        """Ids that have a token; a model's own vocabulary may be padded beyond."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self._parts.template is not None

    @property
    def bos_token_id(self) -> int | None:
        return self._parts.bos_token_id

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt: control tokens are parsed, and one BOS begins it where the model has that."""
        return self._with_one_bos(self._encode(text))

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        special_tokens_in_content: str = "text",
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of a chat as the model's template lays it out.

        special_tokens_in_content: what a control token spelled in the messages becomes: plain `text`, the
            token (`parse`), or an `error`. Raises TemplateError with the cause where there is no template
            or it refuses the messages.
        """
        plain = plain_messages(messages)
        template = self._chat_template()

        def render(chat: Sequence[Message]) -> str:
            return template.render(chat, add_generation_prompt=add_generation_prompt)

        if special_tokens_in_content == "error" and (spelled := self._guard.spelled(plain)):
            raise TemplateError(f"The messages spell the control token {spelled}.")
        if special_tokens_in_content == "parse" or not self._guard.needed(plain):
            return self._with_one_bos(self._encode(render(plain)))
        text = self._guard.render(plain, render, self._seal)
        return self._with_one_bos(self._encode(text, sealed=True))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a whole list of ids; control tokens are left out, broken characters become U+FFFD."""
        return str(self._backend.decode(ids, skip_special_tokens=True))

    def fingerprint(self) -> str:
        """A hex digest over everything that decides ids: the tokenizer, its template and BOS."""
        parts = self._parts
        digest = hashlib.sha256(self._backend.to_str().encode())
        digest.update(json.dumps([parts.template, dict(parts.variables), parts.begins_with_bos]).encode())
        return digest.hexdigest()

    def _encode(self, text: str, *, sealed: bool = False) -> list[int]:
        backend = self._sealed_backend() if sealed else self._backend
        return list(backend.encode(text, add_special_tokens=False).ids)

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos = self._parts.bos_token_id
        if bos is None or not self._parts.begins_with_bos:
            return ids
        extra = 0
        while extra < len(ids) and ids[extra] == bos:
            extra += 1
        return [bos, *ids[extra:]]

    def _chat_template(self) -> ChatTemplate:
        # Compiled when first needed: a model whose template is broken still completes raw prompts.
        if self._parts.template is None:
            raise TemplateError("The model has no chat template; give a prompt instead of messages.")
        if self._template is None:
            self._template = ChatTemplate(self._parts.template, self._parts.variables)
        return self._template

    def _sealed_backend(self) -> Any:
        # Made when first needed: it costs as long as reading a tokenizer, and most jobs never spell a token.
        with self._sealing:
            if self._sealed is None:
                self._sealed = _sealed(self._backend, self._seal)
            return self._sealed

    def _seal(self, token: str) -> str:
        """The name of a control token in the sealed tokenizer; nobody can type it, as nobody knows it."""
        return f"\ufdd0{self._secret}:{self._control[token]}\ufdd1"

    def _end_of_turn(self) -> frozenset[int]:
        """The control token that the template puts behind what the assistant says."""
        chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self._chat_template().render(chat, add_generation_prompt=False)
        except TemplateError:
            return frozenset()
        _, found, behind = text.rpartition(_PROBE)
        ids = self._encode(behind.lstrip()) if found else []
        ends = [i for i in ids[:1] if i in self._control.values() and not self._begins(i)]
        return frozenset(ends)

    def _begins(self, token: int) -> bool:
        """Whether a token is the model's BOS and nothing else; a template may begin the next turn with it."""
        return token == self._parts.bos_token_id and self._parts.begins_with_bos


def _sealed(backend: Any, seal: Any) -> Any:
    """The same tokenizer with its control tokens renamed, so that their spellings are ordinary text.

    Ids, and what text becomes between control tokens, stay as they are.
    """
    from tokenizers import Tokenizer as Backend

    state = json.loads(backend.to_str())
    names = {token["content"]: seal(token["content"]) for token in state["added_tokens"] if token["special"]}
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    # It would name the control tokens too; BOS is put in place here, so it has nothing to do.
    state["post_processor"] = None
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not names.keys() & _merged(pair)]
    return Backend.from_str(json.dumps(state))


def _merged(pair: str | list[str]) -> set[str]:
    left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
    return {left, right, left + right}


def _byte_token_ids(backend: Any) -> frozenset[int]:
    model = json.loads(backend.to_str())["model"]
    if not model.get("byte_fallback"):
        return frozenset()
    byte = re.compile(r"<0x[0-9A-F]{2}>")
    return frozenset(
        index for piece, index in backend.get_vocab(with_added_tokens=False).items() if byte.fullmatch(piece)
    )


def _parts_of_directory(path: Path) -> Parts:
    """Through transformers, which knows the many forms of tokenizer files; no code of the model's is run."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        loaded = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        # The library raises many kinds for damaged or missing files; the first line says which.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelLoadError(f"The tokenizer in {path} cannot be read: {reason[0]}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ModelLoadError(f"The tokenizer in {path} has no fast form ({type(loaded).__name__}).")
    fast = cast("PreTrainedTokenizerFast", loaded)
    bos, eos = fast.bos_token_id, fast.eos_token_id
    plain = backend.encode("a", add_special_tokens=False).ids
    return Parts(
        backend=backend,
        template=_default_template(fast.chat_template),
        variables={
            name: str(token) for name, token in fast.special_tokens_map.items() if isinstance(token, str)
        },
        bos_token_id=bos,
        begins_with_bos=bos is not None and backend.encode("a").ids[: len(plain) + 1] == [bos, *plain],
        eos_token_ids=frozenset() if eos is None else frozenset({eos}),
    )


def _default_template(template: str | dict[str, str] | None) -> str | None:
    """Some models carry several templates by name; chats without tools use the one called default."""
    return template.get("default") if isinstance(template, dict) else template


def _parts_of_gguf(path: Path) -> Parts:
    from pagemill.engine.weights.gguf import GGUFFile
    from pagemill.engine.weights.gguf_tokenizer import begins_with_bos, build_tokenizer, template_of, token_of

    metadata = GGUFFile(path).metadata
    backend = build_tokenizer(metadata)
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: token_of(metadata, role) for name, role in roles.items()}
    ends = {token_of(metadata, role) for role in ("eos", "eot", "eom")}
    return Parts(
        backend=backend,
        template=template_of(metadata),
        variables={name: backend.id_to_token(index) for name, index in ids.items() if index is not None},
        bos_token_id=ids["bos_token"],
        begins_with_bos=begins_with_bos(metadata),
        eos_token_ids=frozenset(end for end in ends if end is not None),
    )
