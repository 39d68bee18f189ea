"""One output row: what it holds, and the columns it becomes.

The schema is written down and never inferred: a column whose first thousand values are null would become
a null column, and the first string after them a conflict. This room may not know how rows are stored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, Self

import pyarrow as pa

from pagemill.jobs.errors import RowFault
from pagemill.jobs.row import Row

SCHEMA_VERSION: Final = 2
"""2 added finished_at at the end. A version adds columns that may be null and changes none."""

# large_string: 64-bit offsets, so that no array of texts can overflow at 2 GB.
TEXT: Final = pa.large_string()
CHOICE: Final = pa.struct(
    [
        pa.field("index", pa.int32(), nullable=False),
        pa.field("text", TEXT),
        pa.field("finish_reason", TEXT),
        pa.field("logprobs", TEXT),
    ]
)
SCHEMA: Final = pa.schema(
    [
        pa.field("row_index", pa.int64(), nullable=False),
        pa.field("custom_id", TEXT, nullable=False),
        pa.field("line", pa.int64()),
        pa.field("status", TEXT, nullable=False),
        pa.field("kind", TEXT),
        pa.field("text", TEXT),
        pa.field("choices", pa.list_(CHOICE)),
        pa.field("finish_reason", TEXT),
        pa.field("prompt_tokens", pa.int64(), nullable=False),
        pa.field("completion_tokens", pa.int64(), nullable=False),
        pa.field("cached_tokens", pa.int64(), nullable=False),
        pa.field("logprobs", TEXT),
        pa.field("error_code", TEXT),
        pa.field("error_message", TEXT),
        pa.field("seed", pa.int64()),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("queued_ms", pa.float64()),
        pa.field("first_token_ms", pa.float64()),
        pa.field("total_ms", pa.float64()),
        pa.field("model", TEXT),
        pa.field("requested_model", TEXT),
        pa.field("metadata", TEXT),
        pa.field("finished_at", pa.float64()),
    ],
    metadata={"pagemill.schema_version": str(SCHEMA_VERSION)},
)
OLDER: Final = (pa.schema(list(SCHEMA)[:-1]),)
"""What files of earlier versions hold: the first columns of SCHEMA; the others are null in their rows."""


@dataclass(slots=True)
class ResultRow:
    """One output row. A failed one has a code and a message and no text; a completed one the reverse.

    choices: only where there is more than one: [{"index", "text", "finish_reason", "logprobs"?}]; `text`
        is then the first one's.
    logprobs, metadata: JSON text.  kind: chat or completion; None where the line could not be read.
    line: physical line, 1-based.  seed: what decided the noise, so that the row can be repeated.
    attempt: leases of the row's shard until it ran, not counting those that were handed back; 0 for a row
        that never ran.
    finished_at: when the worker had the row's result, in seconds since 1970; None for one that never ran.
    """

    row_index: int
    custom_id: str
    line: int | None
    status: Literal["completed", "failed"]
    kind: Literal["chat", "completion"] | None = None
    text: str | None = None
    choices: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    logprobs: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    seed: int | None = None
    attempt: int = 0
    queued_ms: float | None = None
    first_token_ms: float | None = None
    total_ms: float | None = None
    model: str | None = None
    requested_model: str | None = None
    metadata: str | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        if self.status == "failed":
            whole = (
                self.text is None and self.choices is None and bool(self.error_code and self.error_message)
            )
        else:
            whole = self.text is not None and self.error_code is None and self.error_message is None
        if not whole:
            raise ValueError(f"row {self.row_index} is {self.status} but does not look like it")

    @classmethod
    def error_row(
        cls,
        row: Row,
        code: str,
        message: str,
        *,
        attempt: int = 0,
        model: str | None = None,
        prompt_tokens: int = 0,
    ) -> Self:
        """What a good line becomes when it could not be run."""
        return cls(
            row_index=row.row_index,
            custom_id=row.custom_id,
            line=row.line,
            status="failed",
            kind=row.kind,
            prompt_tokens=prompt_tokens,
            error_code=code,
            error_message=message,
            seed=row.seed,
            attempt=attempt,
            model=model,
            requested_model=row.requested_model,
            metadata=None if row.metadata is None else to_json(row.metadata),
        )

    @classmethod
    def fault_row(cls, row_index: int, line: int | None, custom_id: str, fault: RowFault) -> Self:
        """What a bad line becomes."""
        return cls(
            row_index=row_index,
            custom_id=custom_id,
            line=line,
            status="failed",
            error_code=fault.code,
            error_message=fault.message,
        )


def to_json(value: object) -> str:
    """JSON text for the columns that hold some."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


_FIELDS: Final = tuple(f.name for f in fields(ResultRow))
assert tuple(SCHEMA.names) == _FIELDS, "ResultRow and SCHEMA have drifted apart"
