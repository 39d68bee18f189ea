"""What can go wrong, in one sentence each, and the codes that rows and jobs end with.

This room knows words and exit codes. It imports nothing: whoever raises decides, whoever catches shows.
A message is one sentence for the person who can mend it; it never carries a prompt or a secret.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

# Found from the text alone, while planning (`--strict` refuses a job for these, `validate` sees them).
TEXT_CODES: Final = frozenset(
    {
        "invalid_json_line",
        "invalid_request",
        "line_too_long",
        "invalid_encoding",
        "duplicate_custom_id",
        "url_mismatch",
        "model_mismatch",
        "unsupported_parameter",
    }
)
# Found when a row is prepared or run, or when its job ends early.
RUN_CODES: Final = frozenset(
    {
        "prompt_too_long",
        "template_error",
        "numeric_error",
        "engine_error",
        "poison_row",
        "batch_cancelled",
        "batch_expired",
        "job_failed",
        "result_lost",
    }
)
ROW_CODES: Final = TEXT_CODES | RUN_CODES
JOB_CODES: Final = frozenset(
    {
        "empty_file",
        "invalid_encoding",
        "too_many_rows",
        "input_changed",
        "storage_error",
        "model_load_error",
        "task_crashed",
    }
)


@dataclass(frozen=True, slots=True)
class RowFault:
    """Why one row ends as an error row.

    code: a member of ROW_CODES.  message: names the line, the field and the remedy.
    line: the physical line, 1-based; None where no line is known (a list of prompts, say).
    custom_id: the row's own id where it could still be read, so that the error row carries it.
    """

    code: str
    message: str
    line: int | None = None
    custom_id: str | None = None


class PagemillError(Exception):
    """Any failure that a person is told of; `str()` is one clear sentence, `exit_code` the command's."""

    exit_code: ClassVar[int] = 1


class UsageError(PagemillError):
    """What was asked for makes no sense; asking again the same way cannot help."""

    exit_code = 2


class JobNotFound(PagemillError):
    exit_code = 3


class JobConflict(PagemillError):
    """The id belongs to another job, or the job is past the point where this may be done."""

    exit_code = 4


class StorageError(PagemillError):
    """The object store refused, failed or lied.

    transient: true where trying again later may succeed without anybody mending anything.
    """

    exit_code = 5

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


class ObjectNotFound(StorageError):
    """No object has that key."""


class PreconditionFailed(StorageError):
    """The object exists already (put-if-absent), or is no longer the one expected (If-Match)."""


class DiskFull(StorageError):
    """No room on a local disk: scratch space or a local store."""


class RedisUnavailable(PagemillError):
    exit_code = 6


class ModelError(PagemillError):
    """The model cannot be found, read or run."""

    exit_code = 7


class ProtocolMismatch(PagemillError):
    """The other side speaks another version of the protocol."""

    exit_code = 8


class JobFailed(PagemillError):
    """The job that was waited for ended as failed; `code` is its error code."""

    exit_code = 9

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class PlanRefused(PagemillError):
    """The whole file cannot be planned.

    code: a member of JOB_CODES; for a strict job the code of the first bad line.
    """

    exit_code = 9

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
