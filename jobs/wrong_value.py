"""What is said about a value that a field of settings or of a job cannot have: which field, what it may be,
what it was.

The sentence comes from the field's own annotation and limits, so that whoever changes these changes it too.
This room may not know where the value came from, nor which fields there are.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from pagemill.jobs.parameters import shown

VALIDATOR: Final = "Value error, "
"""What pydantic puts before the sentence of a validator, and says nothing."""
_KINDS: Final[dict[Any, str]] = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "a whole number",
    Path: "a path",
    SecretStr: "a text",
    str: "a text",
    tuple: "a list of texts",
}


def wrong_value(
    error: ValidationError,
    model: type[BaseModel],
    label: Callable[[str], str] = lambda name: name,
    *,
    hidden: frozenset[str] = frozenset(),
) -> str:
    """The first complaint about a `model`, in one sentence without its full stop.

    label: what the reader calls a field, by its name. hidden: fields whose values may hold secrets, and are
    not shown; SecretStr never is.
    """
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    called, field = label(name), model.model_fields.get(name)
    if first["type"] == "value_error":  # of a validator of ours, which knows best
        return f"{called}: {first['msg'].removeprefix(VALIDATOR)}"
    if first["type"] == "missing":
        return f"{called} is missing"
    if field is None:
        return f"{called} is not known here" if name else str(first["msg"])
    wanted = _allowed(field)
    if not wanted:
        return f"{called}: {first['msg']}"
    said = (
        "" if name in hidden or SecretStr in _types(field.annotation) else f", not {_value(first['input'])}"
    )
    return f"{called} must be {wanted}{said}"


def _value(value: object) -> str:
    try:
        return shown(value)
    except (TypeError, ValueError):  # no JSON, as a date of TOML's
        return f"a {type(value).__name__}"


def _allowed(field: FieldInfo) -> str:
    """What the field may be, in words; empty where nobody taught us the words."""
    optional = type(None) in _types(field.annotation)
    limits = {**_limits(field.metadata), **_limits(_annotations(field.annotation))}
    for kind in _types(field.annotation):
        if get_origin(kind) is Literal:
            values = [str(value) for value in get_args(kind)]
            return _either([*values, "left out"] if optional else values)
        words = _KINDS.get(get_origin(kind) or kind)
        if words is not None:
            return words + _range(limits) + _length(limits)
    return ""


def _either(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"


def _range(limits: dict[str, Any]) -> str:
    least, above, most = limits.get("ge"), limits.get("gt"), limits.get("le")
    if least is not None and most is not None:
        return f" from {_figure(least)} to {_figure(most)}"
    if least is not None:
        return f", {_figure(least)} or more"
    if above is not None:
        return f" above {_figure(above)}" + (f" and up to {_figure(most)}" if most is not None else "")
    return f", {_figure(most)} or less" if most is not None else ""


def _length(limits: dict[str, Any]) -> str:
    least, most = limits.get("min_length"), limits.get("max_length")
    if most is not None:
        return f" of {least or 0} to {_figure(most)} characters"
    return " that is not empty" if least else ""


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def _limits(metadata: list[Any]) -> dict[str, Any]:
    """Of annotated_types' marks, and of what pydantic keeps as one object."""
    found: dict[str, Any] = {}
    for mark in metadata:
        for part in getattr(mark, "metadata", None) or [mark]:
            for name in ("ge", "gt", "le", "min_length", "max_length"):
                if getattr(part, name, None) is not None:
                    found[name] = getattr(part, name)
    return found


def _types(annotation: Any) -> Iterator[Any]:
    """The alternatives of an annotation, without their marks."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from _types(each)
    else:
        yield annotation


def _annotations(annotation: Any) -> list[Any]:
    """The marks of an annotation's alternatives."""
    if get_origin(annotation) is Annotated:
        return [*annotation.__metadata__, *_annotations(get_args(annotation)[0])]
    if get_origin(annotation) in (Union, types.UnionType):
        return [mark for each in get_args(annotation) for mark in _annotations(each)]
    return []
