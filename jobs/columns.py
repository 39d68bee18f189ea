"""From a row of a table to a line: which column holds the prompt, or which template is filled from columns.

A row that cannot be one (an empty cell, a number where text belongs) becomes a line that says why, and so one
error row; what is wrong with the table itself raises before anything is submitted. This room knows names and
cells. It may not know where tables come from.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final

from pagemill.jobs.errors import UsageError
from pagemill.jobs.parameters import NOTHING, READERS, shown
from pagemill.jobs.request import UNREADABLE

Cells = Mapping[str, Any]
Liner = Callable[[Cells], dict[str, Any]]

ASKING: Final = ("prompt", "messages")
_TEXT: Final = frozenset({"prompt", "id", "custom_id", "model", "user"})
FIELDS: Final = frozenset({*ASKING, "id", "custom_id", "model", "metadata", *READERS, *NOTHING})
# What pandas adds to a frame whose rows are named.
_INDEX: Final = "__index_level_"
_HOLE: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_NAMES_SHOWN: Final = 12


@dataclass(frozen=True, slots=True)
class Columns:
    """How rows of a table become prompts; at most one of `prompt` and `template`.

    prompt: the column that holds them: text, token ids, or messages.
    template: text with `{column}` where a cell goes; `{{` and `}}` are braces. Numbers and dates are written
        as JSON and ISO 8601 have them, lists and structs as JSON.
    id: the column that holds each row's custom_id.
    chat: a text becomes one user message, for the model's chat template, instead of a raw prompt.

    With neither, the columns are the fields of a line: `prompt` or `messages`, `id`, `max_tokens`, …
    """

    prompt: str | None = None
    template: str | None = None
    id: str | None = None
    chat: bool = False

    def __post_init__(self) -> None:
        if self.prompt is not None and self.template is not None:
            raise UsageError("Give a prompt column or a template, not both: each says what a row asks.")

    @property
    def named(self) -> bool:
        """Whether any column is named, which only a table has."""
        return (self.prompt, self.template, self.id) != (None, None, None)

    def asked(self) -> list[str]:
        """The columns that are named, those of a template included."""
        own = [] if self.template is None else holes(self.template)
        return list(dict.fromkeys([*own, *(name for name in (self.prompt, self.id) if name is not None)]))

    def needed(self, names: Sequence[str]) -> list[str]:
        """Those of a table's columns that are read. Raises UsageError where one is missing or is unknown."""
        wanted = self._wanted(names)
        for name in wanted:
            if name not in names:
                raise UsageError(f"There is no column {name!r}; the table has {_listed(names)}.")
            if names.count(name) > 1:
                raise UsageError(f"The table has {names.count(name)} columns {name!r}; rename them.")
        return wanted

    def _wanted(self, names: Sequence[str]) -> list[str]:
        if self.prompt is not None or self.template is not None:
            return self.asked()
        fields = [name for name in names if not name.startswith(_INDEX)]
        if not any(name in fields for name in ASKING):
            raise UsageError(
                f"The table has no column `prompt` or `messages` but {_listed(fields)}; name the prompts' "
                "one with prompt_column (--prompt-column), or give a template."
            )
        unknown = [name for name in fields if name not in FIELDS and name != self.id]
        if unknown:
            raise UsageError(
                f"The column {unknown[0]!r} is no field of a line; name the prompts' column with "
                "prompt_column (--prompt-column), and the others are left out."
            )
        return fields

    def liner(self, *, texts: bool = False) -> Liner:
        """What makes a line of a row's cells. texts: all cells are text, as in CSV, and numbers are in it."""
        template = None if self.template is None else _pieces(self.template)

        def line(cells: Cells) -> dict[str, Any]:
            try:
                if template is not None:
                    asked = _texts("".join(_filled(template, cells)), self.chat)
                elif self.prompt is not None:
                    asked = self._asked(cells[self.prompt])
                else:
                    asked = self._fields(cells, texts)
            except _Unfit as fault:
                asked = {UNREADABLE: str(fault)}
            own = None if self.id is None else cells[self.id]
            return asked if own is None else {"custom_id": own if isinstance(own, str) else str(own), **asked}

        return line

    def _asked(self, cell: Any) -> dict[str, Any]:
        if isinstance(cell, str):
            return _texts(cell, self.chat)
        if isinstance(cell, list) and cell:
            if isinstance(cell[0], Mapping):
                return {"messages": [_present(message) for message in cell]}
            return {"prompt": cell}
        if cell is None:
            raise _Unfit(f"the column `{self.prompt}` is null: fill it, or leave the row out")
        raise _Unfit(f"the column `{self.prompt}` holds {shown(_plain(cell))}, which is no prompt: give text")

    def _fields(self, cells: Cells, texts: bool) -> dict[str, Any]:
        fields = {
            name: _read(name, cell) if texts else _plain(cell)
            for name, cell in cells.items()
            if cell is not None and name != self.id and not (texts and cell == "" and name != "prompt")
        }
        prompt = fields.get("prompt")
        if self.chat and isinstance(prompt, str) and "messages" not in fields:
            del fields["prompt"]
            fields |= _texts(prompt, True)
        return fields


class _Unfit(Exception):
    """Why a row is none."""


def holes(template: str) -> list[str]:
    """The columns that a template names. Raises UsageError for one that cannot be read."""
    return [piece for piece, is_hole in _pieces(template) if is_hole]


def _pieces(template: str) -> list[tuple[str, bool]]:
    """Literal text, and names of columns (True)."""
    pieces: list[tuple[str, bool]] = []
    end = 0
    for found in _HOLE.finditer(template):
        pieces.append((template[end : found.start()], False))
        end = found.end()
        if found[0] in ("{{", "}}"):
            pieces.append((found[0][0], False))
        elif found[1]:
            pieces.append((found[1], True))
        else:
            raise UsageError(
                f"The template has a stray {found[0]!r} at character {found.start() + 1}; write {{column}}, "
                "or {{ and }} for braces."
            )
    pieces.append((template[end:], False))
    if not any(is_hole for _, is_hole in pieces):
        raise UsageError("The template names no column; write {column} where a cell goes.")
    return [piece for piece in pieces if piece[0]]


def _filled(pieces: Sequence[tuple[str, bool]], cells: Cells) -> list[str]:
    texts = []
    for piece, is_hole in pieces:
        if is_hole and cells[piece] is None:
            raise _Unfit(f"the column `{piece}` is null, and the template needs it: fill it")
        cell = _plain(cells[piece]) if is_hole else piece
        texts.append(cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False))
    return texts


def _texts(text: str, chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}


def _plain(cell: Any) -> Any:
    """A cell as JSON has it: dates in ISO 8601, exact decimals as text, bytes in base64."""
    if isinstance(cell, datetime | date | time):
        return cell.isoformat()
    if isinstance(cell, Decimal | timedelta):
        return str(cell)
    if isinstance(cell, bytes):
        return base64.b64encode(cell).decode()
    if isinstance(cell, Mapping):
        return {key: _plain(value) for key, value in cell.items()}
    return [_plain(value) for value in cell] if isinstance(cell, list | tuple) else cell


def _present(message: Mapping[str, Any]) -> dict[str, Any]:
    """A struct has every field in every row: a null one was not said."""
    return {key: _plain(value) for key, value in message.items() if value is not None}


def _read(name: str, text: str) -> Any:
    """A CSV cell of a field: text where text is meant, else JSON where it is JSON."""
    if name in _TEXT:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(map(repr, names[:_NAMES_SHOWN])) + more if names else "none"
