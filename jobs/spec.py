"""What a job is: the document job.json, written once when the job is accepted and never changed.

This room knows names, limits and defaults. It may not know how the job is stored, planned or run.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pagemill.jobs.errors import PagemillError, ProtocolMismatch, UsageError
from pagemill.jobs.parameters import Refusal, read_parameters
from pagemill.jobs.request import parse_row
from pagemill.jobs.row import MAX_SEED, Row, filled_id, row_seed
from pagemill.jobs.wrong_value import wrong_value

__all__ = [
    "DEFAULT_MAX_LINE_BYTES",
    "MAX_SEED",
    "PROTOCOL",
    "InputRef",
    "JobSpec",
    "Row",
    "check_defaults",
    "check_job_id",
    "default_seed",
    "filled_id",
    "new_job_id",
    "parse_row",
    "row_seed",
]

PROTOCOL: Final = 1
DEFAULT_MAX_LINE_BYTES: Final = 16 * 1024 * 1024

_JOB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
# Crockford's alphabet in lower case: sorts like the number, has no letter that reads like a digit.
_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"

# What says how a job is run and for how long it is kept, but not what its rows come out as. A job sent
# twice under one id is the same job when everything else agrees.
_NOT_IDENTITY = {
    "job", "created_at", "priority", "max_shards", "expires_at", "retention_s", "idempotency_key",
    "shard_tokens", "shard_rows", "retry_of", "input",
}  # fmt: skip


class InputRef(BaseModel):
    """The uploaded input: an object of the store, and how to know that it is still the one accepted.

    name: what the file was called, for people.  suffix: ".gz", ".zst" or "" (not compressed).
    sha256: of the stored bytes where the uploader computed it; etags differ between stores and between
        ways of uploading, and would make one file look like two.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    size: int = Field(ge=0)
    etag: str
    name: str = ""
    suffix: Literal["", ".gz", ".zst"] = ""
    sha256: str = ""


class JobSpec(BaseModel):
    """job.json. Building one raises UsageError (bad defaults, bad id) or pydantic's ValidationError.

    defaults: sampling parameters for rows that do not set them, in canonical form.
    seed: the job's; rows without one get `row_seed(seed, row_index)`.
    max_shards: most shards leased at once.  expires_at: seconds since the epoch.
    context: tokens of prompt plus completion, where the job declares less than the model has.
    shard_tokens, shard_rows: how much estimated work, and how many rows, make a shard.
    retry_of: the job whose failed rows these are.
    max_expanded_bytes: what a compressed input may expand to; None for a rule by its size (plan.py).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    protocol: int = PROTOCOL
    job: str
    model: str = Field(min_length=1, max_length=1024)
    created_at: float
    input: InputRef
    defaults: dict[str, Any] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)]
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] = 0
    max_shards: Annotated[int, Field(ge=1)] | None = None
    expires_at: float | None = None
    context: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    special_tokens_in_content: Literal["text", "parse", "error"] = "text"
    model_policy: Literal["override", "match"] = "override"
    max_rows: Annotated[int, Field(ge=1)] | None = None
    max_line_bytes: Annotated[int, Field(ge=1, le=1 << 30)] = DEFAULT_MAX_LINE_BYTES
    max_expanded_bytes: Annotated[int, Field(ge=1)] | None = None
    strict: bool = False
    shard_tokens: Annotated[int, Field(ge=1)] = 60_000
    shard_rows: Annotated[int, Field(ge=1)] = 2_000
    idempotency_key: str | None = None
    retry_of: str | None = None
    retention_s: Annotated[int, Field(ge=0)] = 7 * 86_400

    @field_validator("job")
    @classmethod
    def _job_id(cls, value: str) -> str:
        return check_job_id(value)

    @field_validator("defaults", mode="before")
    @classmethod
    def _defaults(cls, value: object) -> dict[str, Any]:
        return check_defaults(value)

    def digest(self) -> str:
        """A hash over everything that decides what the rows come out as (not over id, times, pace)."""
        doc = self.model_dump(mode="json", exclude=_NOT_IDENTITY)
        source = self.input
        doc["input"] = [source.suffix, source.size, source.sha256 or source.etag]
        text = json.dumps(doc, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def load(cls, data: bytes | str) -> JobSpec:
        """Read job.json. Raises ProtocolMismatch or PagemillError, one sentence each."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise _explain(data, error) from None


def _explain(data: bytes | str, error: ValidationError) -> PagemillError:
    try:
        version = json.loads(data).get("protocol")
    except (ValueError, AttributeError):
        return PagemillError("job.json is not a JSON object: the job was not written by pagemill.")
    if version != PROTOCOL:
        return ProtocolMismatch(f"job.json speaks protocol {version}, this pagemill {PROTOCOL}: upgrade one.")
    return PagemillError(f"job.json does not hold a job: {wrong_value(error, JobSpec)}.")


def check_defaults(raw: object) -> dict[str, Any]:
    """Sampling parameters of a job, in canonical form. Raises UsageError naming the one at fault."""
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise UsageError("the job's defaults must be an object of sampling parameters.")
    try:
        # A default of "none" is no default.
        return {name: value for name, value in read_parameters(raw).items() if value is not None}
    except Refusal as refusal:
        raise UsageError(f"the job's defaults: {refusal.message}.") from None


def new_job_id() -> str:
    """A fresh id that sorts by time: `job-`, ten characters of milliseconds, ten random ones."""
    number = (time.time_ns() // 1_000_000) << 50 | secrets.randbits(50)
    digits = [_BASE32[number >> shift & 31] for shift in range(95, -1, -5)]
    return "job-" + "".join(digits)


def check_job_id(text: str) -> str:
    """The id itself. Raises UsageError: ids are part of keys and paths, so most characters are out."""
    if not isinstance(text, str) or not _JOB_ID.fullmatch(text) or ".." in text:
        raise UsageError(
            f"{str(text)[:140]!r} is not a job id: use 1 to 128 of A-Z a-z 0-9 . _ - "
            "(no '..', and neither . nor - first)."
        )
    return text


def default_seed(job: str) -> int:
    """The seed of a job whose sender chose none: from its id, so that sending it again changes nothing."""
    digest = blake2b(job.encode(), digest_size=8, person=b"pagemill-job").digest()
    return int.from_bytes(digest, "little") & MAX_SEED
