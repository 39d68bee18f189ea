"""Jobs and rows in the words of OpenAI's Batch API: what its Python package validates, ours says.

https://platform.openai.com/docs/api-reference/batch has the shapes: a batch object, an output file of
responses, an error file. This room may not know Redis.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Any, Final

from pagemill.jobs import layout
from pagemill.jobs.errors import PlanRefused, StorageError
from pagemill.jobs.lines import read_lines
from pagemill.jobs.request import URLS, parse_row
from pagemill.jobs.result import ResultRow
from pagemill.jobs.row import Row
from pagemill.jobs.spec import JobSpec
from pagemill.jobs.status import JobStatus
from pagemill.jobs.storage import Storage, read_json
from pagemill.jobs.submission import read_spec

# OpenAI's names for what a request was, by the kind of row.
_OBJECTS: Final = {"chat": "chat.completion", "completion": "text_completion"}
_IDS: Final = {"chat": "chatcmpl", "completion": "cmpl"}
# Theirs has no word for a job that ends for another reason than being cancelled.
_STATES: Final = {"expiring": "finalizing", "failing": "finalizing"}
_NO_DEADLINE: Final = "unlimited"
LOOK_AT: Final = 100


def batch_document(
    status: JobStatus,
    spec: JobSpec | None = None,
    kind: str | None = None,
    stopped_at: float | None = None,
) -> dict[str, Any]:
    """A status as OpenAI's batch object (`openai.types.Batch`).

    Ids of files are addresses in the store: of the input, and, once there are results, of the manifest that
    lists them; `pagemill results JOB --format openai` writes the two files. completion_window: hours until
    the deadline, "unlimited" without one. Times are whole seconds since 1970.

    spec: the job's document where it can be read, for the input and the deadline. kind: of the first row.
    stopped_at: when somebody asked that the job stops.
    """
    ended = {"completed": "completed_at", "failed": "failed_at", "expired": "expired_at",
             "cancelled": "cancelled_at"}  # fmt: skip
    times: dict[str, float | None] = {
        "in_progress_at": status.started_at,
        "expires_at": status.expires_at,
        "finalizing_at": status.updated_at if status.state == "finalizing" else None,
        "cancelling_at": stopped_at if status.state in ("cancelling", "cancelled") else None,
        **{field: status.finished_at if status.state == state else None for state, field in ended.items()},
    }
    key = "" if spec is None else spec.input.key.rpartition("/")[2]
    results = f"{status.output}/manifest.json" if status.terminal else None
    return {
        "id": status.job,
        "object": "batch",
        "endpoint": _endpoint(kind),
        "model": status.model,
        "errors": _errors(status),
        "input_file_id": f"{status.output}/{key}",
        "completion_window": _window(status),
        "status": _STATES.get(status.state, status.state),
        "output_file_id": results if status.completed else None,
        "error_file_id": results if status.failed else None,
        "created_at": int(status.created_at or 0),
        **{name: None if at is None else int(at) for name, at in times.items()},
        "request_counts": {name: getattr(status, name) for name in ("total", "completed", "failed")},
        "usage": _usage(status),
        "metadata": {"blocked_reason": status.blocked_reason[:512]} if status.blocked_reason else None,
    }


def batch_of(storage: Storage, status: JobStatus) -> dict[str, Any]:
    """The same, with what the store knows of the job."""
    spec = read_spec(storage, status.job)
    kind = None if spec is None else _first_kind(storage, spec)
    return batch_document(status, spec, kind, (read_json(storage, layout.stop(status.job)) or {}).get("at"))


def _first_kind(storage: Storage, spec: JobSpec) -> str | None:
    """Of the first line that is a request; jobs may mix both, and a batch object has one endpoint."""
    try:
        with storage.open(spec.input.key) as stream:
            for line in islice(read_lines(stream, suffix=spec.input.suffix), LOOK_AT):
                row = parse_row(line, spec)
                if isinstance(row, Row):
                    return row.kind
    except (StorageError, PlanRefused):
        return None
    return None


def _endpoint(kind: str | None) -> str:
    return next(url for url, of in URLS.items() if of == (kind or "chat"))


def _errors(status: JobStatus) -> dict[str, Any] | None:
    """What was wrong with the job as a whole; rows have theirs in the error file."""
    if not status.error_code:
        return None
    error = {"code": status.error_code, "message": status.error_message, "line": None, "param": None}
    return {"object": "list", "data": [error]}


def _window(status: JobStatus) -> str:
    if status.expires_at is None or status.created_at is None:
        return _NO_DEADLINE
    return f"{max(1, round((status.expires_at - status.created_at) / 3600))}h"


def _usage(status: JobStatus) -> dict[str, Any]:
    return {
        "input_tokens": status.prompt_tokens,
        "input_tokens_details": {"cached_tokens": status.cached_tokens},
        "output_tokens": status.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": status.prompt_tokens + status.completion_tokens,
    }


def output_line(row: ResultRow, created: int) -> dict[str, Any]:
    """A completed row as a line of the output file; created: seconds since 1970."""
    kind = row.kind or "chat"
    choices = row.choices or [
        {"index": 0, "text": row.text, "finish_reason": row.finish_reason, "logprobs": row.logprobs}
    ]
    usage = {
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": row.completion_tokens,
        "total_tokens": row.prompt_tokens + row.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": row.cached_tokens},
    }
    body = {
        "id": f"{_IDS[kind]}-{row.row_index}",
        "object": _OBJECTS[kind],
        "created": created,
        "model": row.model,
        "choices": [_choice(kind, choice) for choice in choices],
        "usage": usage,
    }
    if row.metadata is not None:
        body["metadata"] = json.loads(row.metadata)
    return {
        "id": f"batch_req_{row.row_index}",
        "custom_id": row.custom_id,
        "response": {"status_code": 200, "request_id": f"req_{row.row_index}", "body": body},
        "error": None,
    }


def _choice(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    text = choice.get("text") or ""
    message = {"message": {"role": "assistant", "content": text, "refusal": None}}
    found = choice.get("logprobs")
    entries = json.loads(found) if isinstance(found, str) else found
    shape = _chat_logprobs if kind == "chat" else _completion_logprobs
    return {
        "index": choice.get("index", 0),
        **(message if kind == "chat" else {"text": text}),
        "logprobs": None if entries is None else shape(entries),
        "finish_reason": choice.get("finish_reason"),
    }


def _chat_logprobs(entries: list[dict[str, Any]]) -> dict[str, Any]:
    content = [
        _token(entry) | {"top_logprobs": [_token(other) for other in entry["top_logprobs"]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _token(entry: dict[str, Any]) -> dict[str, Any]:
    """bytes: null where a token is a piece of a character, whose bytes are not in our results."""
    token = entry["token"]
    whole = "\N{REPLACEMENT CHARACTER}" not in token
    return {"token": token, "logprob": entry["logprob"], "bytes": list(token.encode()) if whole else None}


def _completion_logprobs(entries: list[dict[str, Any]]) -> dict[str, Any]:
    offsets, offset = [], 0
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {other["token"]: other["logprob"] for other in entry["top_logprobs"]} for entry in entries
        ],
        "text_offset": offsets,
    }


def error_line(row: ResultRow) -> dict[str, Any]:
    """A failed row as a line of the error file."""
    error: dict[str, Any] = {"code": row.error_code, "message": row.error_message}
    if row.line is not None:
        error["line"] = row.line
    return {
        "id": f"batch_req_{row.row_index}",
        "custom_id": row.custom_id,
        "response": None,
        "error": error,
    }
