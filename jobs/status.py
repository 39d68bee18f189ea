"""What the state in Redis looks like from Python: frozen records, one for each answer.

This room may not know how they got here: it neither talks to Redis nor to the store. Times are seconds since
the epoch by the Redis server's clock (`created_at` and `expires_at` are the submitter's), rates per second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

Kind = Literal["finalize", "plan", "shard"]
KINDS: tuple[Kind, ...] = get_args(Kind)

RUNNING = frozenset({"validating", "in_progress"})
DRAINING = frozenset({"cancelling", "expiring", "failing"})
TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})
STATES = RUNNING | DRAINING | TERMINAL | {"finalizing"}

StopReason = Literal["cancelled", "expired", "failed"]
STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)


@dataclass(frozen=True, slots=True)
class Created:
    """`existed` is true when Redis already knew this very job; nothing was changed then."""

    job: str
    existed: bool


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The public hash of a job, typed. An unset time or estimate is None, an unset word is ""."""

    job: str
    state: str
    blocked_reason: str
    model: str
    total: int
    completed: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    shards_total: int
    shards_done: int
    created_at: float | None
    started_at: float | None
    updated_at: float | None
    finished_at: float | None
    expires_at: float | None
    output: str
    error_code: str
    error_message: str
    rows_running: int
    workers_active: int
    tokens_per_second: float
    eta_seconds: float | None

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL

    @classmethod
    def from_hash(cls, job: str, values: Mapping[str, str]) -> Self:
        """Reads the strings of the hash; fields that a newer version added are passed over."""
        readers: dict[str, Callable[[str], Any]] = {
            "int": int,
            "float": float,
            "str": str,
            "float | None": _optional_float,
        }
        read = {f.name: readers[str(f.type)](values.get(f.name) or _blank(str(f.type))) for f in fields(cls)}
        return cls(**{**read, "job": job})


@dataclass(frozen=True, slots=True)
class Lease:
    """One task, held by one worker until its deadline; `fence` orders all holders that the task ever had."""

    job: str
    task: str
    kind: Kind
    shard: int | None
    fence: str
    epoch: int
    state: str
    stop: StopReason | None
    """Why the job drains. A stopped job's shard needs no engine: its unfinished rows become errors."""
    strikes: int
    """Earlier leases of this task that ended without a seal, a commit or a release."""
    attempt: int
    """1 for the first lease of the task; a lease that was handed back is not counted."""
    more: bool
    """Another task of this model was ready when this one was leased."""
    ttl_ms: int
    fingerprint: str
    """Of the model that this job's rows run on, "" while nobody has recorded one."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """`ok` is false when the task was taken over, committed or its job is gone: stop working on it."""

    ok: bool
    state: str
    """Of the job; "" when Redis does not know it (any more)."""
    stop: StopReason | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Of one shard, absolute: everything that its holder has sealed, and what earlier holders had."""

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, counts: Mapping[str, Any]) -> Self:
        """From anything that carries these names: a segment, a part, a manifest."""
        return cls(**{f.name: int(counts[f.name]) for f in fields(cls)})

    def as_args(self) -> tuple[int, int, int, int, int]:
        return (self.completed, self.failed, self.prompt_tokens, self.completion_tokens, self.cached_tokens)


@dataclass(frozen=True, slots=True)
class SealOutcome:
    """`counted` is false when this (fence, seq) was recorded before: the first call had arrived after all."""

    counted: bool
    state: str
    stop: StopReason | None


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """The commit record that Redis holds for the shard, whoever wrote it, and the state the job is in now."""

    record: dict[str, Any]
    state: str

    @property
    def part(self) -> dict[str, Any]:
        part: dict[str, Any] = self.record["part"]
        return part


@dataclass(frozen=True, slots=True)
class StopOutcome:
    """`accepted` is true when the job drains for this reason, also when it already did."""

    accepted: bool
    state: str


@dataclass(frozen=True, slots=True)
class Want:
    """Jobs with a shard that waits for a model's engine, and that the worker who asks could run.

    unserved: those of them that no other worker works on or could take. priority: the highest of all.
    alone: those of the unserved that no other living worker could load the model for. loaded: other living
    workers that have the model loaded, or are loading it.
    """

    jobs: int = 0
    unserved: int = 0
    priority: int = 0
    alone: int = 0
    loaded: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a job's event stream; `id` is where to read on from."""

    id: str
    kind: str
    data: dict[str, str]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says about itself with each heartbeat. Never holds a prompt."""

    worker: str
    host: str = ""
    pid: int = 0
    state: str = "starting"
    """starting, ready, draining or sick; `message` says more."""
    message: str = ""
    models: tuple[str, ...] = ()
    """Those it may load; `loaded` is the one that is in its engine or on the way there, "" for none."""
    loaded: str = ""
    fingerprint: str = ""
    context: int = 0
    device: str = ""
    dtype: str = ""
    version: str = ""
    started_at: float = 0.0
    seen_at: float = 0.0
    """Set by the server when the heartbeat arrives."""
    shards_running: int = 0
    rows_running: int = 0
    kv_used: float = 0.0
    """Share of the KV blocks in use, 0 to 1."""
    tokens_per_second: float = 0.0

    def to_hash(self) -> dict[str, str]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "models"}
        return {**{name: str(value) for name, value in values.items()}, "models": "\n".join(self.models)}

    @classmethod
    def from_hash(cls, values: Mapping[str, str]) -> Self:
        readers: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
        named = [(f.name, str(f.type)) for f in fields(cls) if f.name in values and f.name != "models"]
        read = {name: readers[kind](values[name] or _blank(kind)) for name, kind in named}
        models = tuple(name for name in values.get("models", "").split("\n") if name)
        return cls(**{**read, "models": models})


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the doctor asks of Redis: new enough, keeps what it is told, speaks our protocol?"""

    version: str
    maxmemory_policy: str
    """"" where the server does not let us read its configuration."""
    persistent: bool
    uptime_seconds: int
    protocol: int | None
    """None while nobody has used this Redis for Pagemill."""


def task_name(kind: Kind, shard: int | None = None) -> str:
    return kind if shard is None else f"{kind}:{shard}"


def _optional_float(text: str) -> float | None:
    return float(text) if text else None


def _blank(kind: str) -> str:
    return "0" if kind in ("int", "float") else ""
