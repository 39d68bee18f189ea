"""The terms of a submission: sampling parameters by name, model, id, deadline, and what is wrong with them.

This room may not know what is done with a job.
"""

from __future__ import annotations

import hashlib
import time
from datetime import datetime, timedelta
from typing import TypedDict

from pagemill.jobs.errors import UsageError
from pagemill.jobs.spec import check_job_id

When = datetime | timedelta | float


class Sampling(TypedDict, total=False):
    """Sampling parameters for every row that does not set its own; unset ones are the model's."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    n: int
    stop: str | list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[str, float]
    logprobs: bool | int
    top_logprobs: int
    truncate_prompt_tokens: int


def checked_model(model: str) -> str:
    """The name itself; it is shown in tables and is part of Redis keys. Raises UsageError."""
    if not model.strip():
        raise UsageError("Name the model that the job is for.")
    if not model.isprintable():
        raise UsageError(f"{model!r} is no name of a model: it has characters that cannot be shown.")
    return model


def chosen_id(job_id: str | None, idempotency_key: str | None) -> str | None:
    """The id that the sender means, None where it is left to us."""
    if job_id is not None and idempotency_key is not None:
        raise UsageError("Give a job_id or an idempotency_key, not both: each names the job.")
    if idempotency_key is not None:
        if not idempotency_key.strip():  # an unset variable, say: every submission would be the same job
            raise UsageError("The idempotency key is empty; give it a text, or leave it out.")
        return "key-" + hashlib.sha256(idempotency_key.encode()).hexdigest()[:32]
    return None if job_id is None else check_job_id(job_id)


def moment(deadline: When | None) -> float | None:
    """A deadline as seconds since the epoch. Raises UsageError for one without a zone, or in the past."""
    if deadline is None:
        return None
    if isinstance(deadline, datetime):
        if deadline.tzinfo is None:
            raise UsageError("The deadline has no time zone; give one: datetime.now(timezone.utc) + …")
        at = deadline.timestamp()
    else:
        at = time.time() + seconds(deadline)
    if not at > time.time():
        raise UsageError("The deadline has passed already.")
    return at


def seconds(span: timedelta | float) -> float:
    return span.total_seconds() if isinstance(span, timedelta) else float(span)
