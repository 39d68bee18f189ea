"""JSON as RFC 8259 has it, and no more: what gets through here breaks nothing later.

This room knows one line of bytes. It may not know what the line means. On top of the standard library's
parser (strict about syntax, lax about the rest) it refuses NaN and Infinity, numbers that overflow, keys
given twice, lone surrogates (they break tokenizers and Parquet writers) and deep nesting (it breaks
recursive readers).

Ten million lines pass through here, so the ordinary line pays for C code and a few substring searches;
the walks in Python run only for lines that could hold the fault they look for.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

MAX_NESTING: Final = 64
# A whole number beyond this overflows a double, and so most other readers of what we write.
_LARGEST_INT: Final = 2**1024
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class InvalidJson(Exception):
    """Bytes that are no acceptable JSON; `code` is a row code, `message` a sentence with the remedy."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def _invalid(message: str) -> InvalidJson:
    return InvalidJson("invalid_json_line", message)


def parse_json(data: bytes) -> Any:
    """The value that the bytes spell. Raises InvalidJson and nothing else."""
    text = _decode(data)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _invalid(_syntax(error, text)) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # int() refuses what has thousands of digits: converting takes quadratic time
        raise _invalid("a number overflows: write it with fewer digits, or as a string") from None
    # A raw lone surrogate is not UTF-8 and was refused above, so only an escape can spell one.
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(value)
    if text.count("[") + text.count("{") > MAX_NESTING:
        _check_nesting(value)
    return value


def check_numbers(value: Any, name: str) -> None:
    """Refuse whole numbers that overflow a double, at any depth.

    Called for what is carried through unread; what is read has narrower limits. Raises InvalidJson.
    """
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif type(item) is int and not -_LARGEST_INT < item < _LARGEST_INT:
            raise _invalid(f"`{name}` holds a number that overflows: write it as a string")


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        place = f"byte {error.start + 1} (0x{data[error.start]:02x})"
        raise InvalidJson("invalid_encoding", f"{place} is not UTF-8: save the file as UTF-8") from None


def _syntax(error: json.JSONDecodeError, text: str) -> str:
    if text.startswith("\ufeff"):
        return "the line starts with a byte order mark, which only the first line may: remove it"
    if error.msg == "Extra data":
        return f"more text follows the JSON value (column {error.pos + 1}): give each value a line of its own"
    reason = error.msg[0].lower() + error.msg[1:]
    return f"not valid JSON: {reason} (column {error.pos + 1}); write one JSON object a line"


def _too_deep() -> InvalidJson:
    return _invalid(f"nested deeper than {MAX_NESTING} levels: flatten it, or carry it as a string")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _invalid(f"the key {json.dumps(twice[:80])} is given twice in one object: keep one of them")
    return out


def _constant(text: str) -> Any:
    raise _invalid(f"{text} is not JSON: use null or a number")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _invalid(f"the number {text[:40]} overflows: write it smaller, or as a string")
    return value


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float)


def _check_surrogates(value: Any) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            found = _LONE_SURROGATE.search(item)
            if found:
                raise _invalid(
                    f"\\u{ord(found[0]):04x} is half of a surrogate pair: write both halves or neither"
                )
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def _check_nesting(value: Any) -> None:
    level = [value]
    depth = 0
    while level:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
            else:
                continue
        if any(isinstance(item, dict | list) for item in level):
            depth += 1
            if depth > MAX_NESTING:
                raise _too_deep()
        level = inner
