"""What a row asks with: chat messages, a text, or token ids.

This room knows the shapes a prompt may come in. It may not know tokenizers or templates: whether a chat
fits a model's template is found when the row is prepared.
"""

from __future__ import annotations

from typing import Any, Final

from pagemill.jobs.parameters import invalid, shown, token_ids, unsupported

# A developer message is the newer name of a system message; templates know only the older.
ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MAX_PROMPT_TOKEN_IDS: Final = 2**31 - 1
# What clients write into messages without meaning anything by it.
_EMPTY_FIELDS: Final = frozenset(
    {
        "name",
        "refusal",
        "tool_calls",
        "function_call",
        "audio",
        "annotations",
        "reasoning_content",
        "tool_call_id",
    }
)


def read_messages(value: Any, name: str = "messages") -> list[dict[str, str]]:
    """Messages with one of three roles and plain text content. Raises Refusal."""
    if not isinstance(value, list):
        raise invalid(f"`{name}` must be a list of messages, not {shown(value)}")
    if not value:
        raise invalid(f"`{name}` is empty: give at least one message")
    return [_message(message, f"{name}[{i}]") for i, message in enumerate(value)]


def _message(message: Any, name: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise invalid(f'`{name}` must be an object {{"role", "content"}}, not {shown(message)}')
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        if role in ("tool", "function"):
            raise unsupported(f"`{name}.role`: {shown(role)} is not supported: tools are not")
        missing = "is missing" if role is None else f"is {shown(role)}"
        raise invalid(f"`{name}.role` {missing}: use system, developer, user or assistant")
    if len(message) > 2 or "content" not in message:
        _check_fields(message, name)
    content = message.get("content")
    if not isinstance(content, str):
        content = _joined(content, f"{name}.content")
    return {"role": ROLES[role], "content": content}


def _check_fields(message: dict[str, Any], name: str) -> None:
    for field, value in message.items():
        if field in ("role", "content"):
            continue
        if field not in _EMPTY_FIELDS or not (value is None or value == []):
            raise unsupported(f"`{name}.{field}` is not supported: leave it out")


def _joined(content: Any, name: str) -> str:
    """Text parts as one text, with nothing between them: the parts say where spaces are."""
    if content is None:
        raise invalid(f"`{name}` is missing: give the text of the message")
    if not isinstance(content, list):
        raise invalid(f"`{name}` must be a string or a list of text parts, not {shown(content)}")
    if not content:
        raise invalid(f"`{name}` is an empty list: give a string or at least one text part")
    return "".join(_part(part, f"{name}[{i}]") for i, part in enumerate(content))


def _part(part: Any, name: str) -> str:
    if not isinstance(part, dict):
        raise invalid(f'`{name}` must be an object {{"type": "text", "text": ...}}, not {shown(part)}')
    kind = part.get("type")
    if not isinstance(kind, str):
        raise invalid(f'`{name}.type` must be "text", not {shown(kind)}')
    if kind != "text":
        raise unsupported(f"`{name}.type`: {shown(kind)} is not supported: only text parts are")
    for field in part:
        if field not in ("type", "text"):
            raise unsupported(f"`{name}.{field}` is not supported: leave it out")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"`{name}.text` must be a string, not {shown(text)}")
    return text


def read_prompt(value: Any, name: str = "prompt") -> tuple[str | None, list[int] | None]:
    """A text or token ids: the one that was given, and None. Raises Refusal."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise invalid(f"`{name}` is empty: give at least one character")
        return value, None
    if not isinstance(value, list):
        raise invalid(f"`{name}` must be a string or a list of token ids, not {shown(value)}")
    if not value:
        raise invalid(f"`{name}` is an empty list: give a string or at least one token id")
    if isinstance(value[0], str | list):
        raise invalid(f"`{name}` holds {len(value)} prompts: give each a line of its own")
    return None, token_ids(name, value, MAX_PROMPT_TOKEN_IDS)
