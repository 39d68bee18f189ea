"""Renders chats through a model's template, and keeps what people wrote apart from what the template wrote.

A template comes with the model and is untrusted code: it runs in jinja's sandbox, with the names that
transformers gives templates. This room knows strings only; ids are the tokenizer's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from pagemill.engine.errors import EngineError

Message = Mapping[str, Any]


class TemplateError(EngineError):
    """A chat cannot be rendered by this model's template; the text names the cause."""


class ChatTemplate:
    """A compiled template; `variables` are what it sees besides the messages (bos_token, eos_token, ...)."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self._variables = dict(variables)
        self._template = _compile(source)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a chat; raises TemplateError with the template's own reason where it refuses."""
        try:
            text: str = self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._variables
            )
        except _Refused as error:
            raise TemplateError(f"The chat template refuses these messages: {error}") from error
        except Exception as error:
            # Whatever a template trips over is the fault of template and messages together.
            kind = type(error).__name__
            raise TemplateError(f"The chat template fails on these messages: {error} ({kind}).") from error
        return text


def _compile(source: str) -> Any:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.exceptions.TemplateError as error:
        raise TemplateError(f"The model's chat template is not valid: {error}.") from error


def _generation_tag() -> Any:
    import jinja2.ext
    import jinja2.nodes

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks the assistant's part for training; here it is just its content."""

        tags = {"generation"}  # noqa: RUF012 - the name that jinja reads

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    return Generation


class _Refused(Exception):
    """A template called raise_exception."""


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    # jinja's own filter escapes for HTML, which would change the text.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as templates know them: text parts joined, `developer` as `system`, nulls left out."""
    if not isinstance(messages, list | tuple) or not messages:
        raise TemplateError("A chat needs at least one message.")
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TemplateError(f"Message {i} has no role.")
        fields = {key: value for key, value in message.items() if value is not None}
        if fields["role"] == "developer":
            fields["role"] = "system"
        if isinstance(fields.get("content"), list):
            fields["content"] = _joined_parts(fields["content"], i)
        # Templates print what is missing as nothing, and numbers as digits: not what was meant.
        if not isinstance(fields.get("content", "" if "tool_calls" in fields else None), str):
            raise TemplateError(f"Message {i} has no text as its content.")
        plain.append(fields)
    return plain


def _joined_parts(parts: list[Any], message: int) -> str:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise TemplateError(f"Message {message} has a part of type {kind!r}; only text is supported.")
        texts.append(text)
    return "".join(texts)


class Guard:
    """Finds control tokens that people spelled, and carries them through a template as plain text.

    A spelling is replaced by a mark before rendering, so that every control token in the rendered text is
    the template's own; `control` then turns those into names that cannot be typed (the tokenizer's), and
    the marks turn back into what they stood for. Templates may still trim, split and compare the content:
    only the spellings are hidden from them.
    """

    # Unicode noncharacters never occur in interchanged text; where one does, another is used.
    _NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))

    def __init__(self, control_tokens: Iterable[str]) -> None:
        tokens = sorted(control_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._starts = frozenset(token[:n] for token in tokens for n in range(1, len(token)))
        self._ends = frozenset(token[n:] for token in tokens for n in range(1, len(token)))
        self._longest = max(map(len, tokens), default=0)

    def spelled(self, value: Any) -> str | None:
        """The first control token spelled anywhere in messages, or None."""
        found = (match.group() for text in _strings(value) if (match := self._search(text)))
        return next(found, None)

    def needed(self, value: Any) -> bool:
        """Whether any string holds a control token or, at an edge, a part of one that could become whole."""
        return any(
            self._search(text) or self._open_end(text) or self._open_start(text) for text in _strings(value)
        )

    def _search(self, text: str) -> re.Match[str] | None:
        return self._pattern.search(text) if self._pattern else None

    def _open_end(self, text: str) -> bool:
        return any(text[-n:] in self._starts for n in range(1, min(self._longest, len(text) + 1)))

    def _open_start(self, text: str) -> bool:
        return any(text[:n] in self._ends for n in range(1, min(self._longest, len(text) + 1)))

    def render(
        self,
        messages: Sequence[Message],
        render: Callable[[Sequence[Message]], str],
        control: Callable[[str], str],
    ) -> str:
        """Renders with spellings hidden; template text's own control tokens become `control(token)`."""
        used = set().union(*_strings(list(messages)))
        free = [char for char in self._NONCHARACTERS if char not in used]
        if len(free) < 2:
            raise TemplateError("The messages use up the characters that hide control tokens.")
        opening, closing = free[:2]
        hidden: list[str] = []

        def hide(text: str) -> str:
            return self._hide(text, opening, closing, hidden)

        rendered = render([_mapped(message, hide) for message in messages])
        mark = re.compile(f"{opening}([0-9]*){closing}")
        pieces = mark.split(rendered)  # text, index, text, index, ..., text
        for i, piece in enumerate(pieces):
            if i % 2:
                pieces[i] = hidden[int(piece)] if piece else ""
            elif self._pattern:
                pieces[i] = self._pattern.sub(lambda match: control(match.group()), piece)
        return "".join(pieces)

    def _hide(self, text: str, opening: str, closing: str, hidden: list[str]) -> str:
        def mark(match: re.Match[str]) -> str:
            hidden.append(match.group())
            return f"{opening}{len(hidden) - 1}{closing}"

        start = opening + closing if self._open_start(text) else ""
        end = opening + closing if self._open_end(text) else ""
        body = self._pattern.sub(mark, text) if self._pattern else text
        return start + body + end


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The same value with its strings changed; keys are the template's words and stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
