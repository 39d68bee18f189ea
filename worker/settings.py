"""What a worker can be told: flags, then PAGEMILL_* variables, then a file, then these defaults.

It extends the client's settings, so both sides read the same names for Redis and the store. This room
may not know how any of it is used.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import NoDecode

from pagemill.jobs.settings import ClientSettings
from pagemill.jobs.settings_file import read_config


def default_worker_id() -> str:
    """Unique among running workers: two on one machine differ, and so do two lives of one container."""
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"


@dataclass(frozen=True, slots=True)
class Choice:
    """A model that a worker may load: what jobs call it, and where its files are (models.py)."""

    name: str
    source: str

    @classmethod
    def of(cls, text: str) -> Choice:
        """From NAME=SOURCE or SOURCE, whose name is a path's last part, else the source as written."""
        name, sign, source = text.partition("=")
        if sign and name.strip() and source and not Path(text).exists():
            return cls(name.strip(), source)
        path = Path(text)
        return cls(path.resolve().name.removesuffix(".gguf") if path.exists() else text, text)


class WorkerSettings(ClientSettings):
    """Everything a worker reads. Seconds and rows unless a name says otherwise."""

    model: str = Field("smollm2", description="smollm2, a directory, a .gguf file, or a hub name")
    models: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="instead of model: several, each SOURCE or NAME=SOURCE, loaded one at a time"
    )
    model_slice_s: float = Field(
        60.0, ge=0, description="how long a model keeps the engine, at least, while another waits for it"
    )
    name: str | None = Field(None, description="the name jobs ask for; by default the model's own")
    worker_id: str = Field(default_factory=default_worker_id, description="how this worker signs leases")

    engine: Literal["native", "simulated"] = Field("native", description="simulated: load and chaos runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field("auto", description="auto takes a card where there is one")
    quantization: Literal["int8", "fp8"] | None = Field(
        None, description="dense layers in 8-bit integers, or on a card in 8-bit floats"
    )
    kv_cache_dtype: Literal["int8", "fp8"] | None = Field(
        None, description="on a card: keys and values in 8 bits, nearly twice the tokens in the same memory"
    )
    kv_cache_gb: float | None = Field(
        None,
        gt=0,
        le=1 << 20,
        description="memory for keys and values; by default 1 on a CPU, what is left on a card",
    )
    context: int | None = Field(None, ge=1, description="hold less than the model's own context")
    threads: int | None = Field(None, ge=1, description="threads of the engine's arithmetic")
    max_num_seqs: int | None = Field(None, ge=1, description="rows in one step of the engine")
    deterministic: bool = Field(False, description="a row's bits depend on nothing but the row, in any dtype")
    prefix_cache: bool = Field(True, description="share the memory of common prefixes")
    prefix_order: bool = Field(True, description="rows with a common prefix one after another")
    long_rows_first: bool = Field(True, description="of rows that wait, the longest first")
    learned_lengths: bool = Field(True, description="expect answers as long as the job's have been")
    identical_rows: bool = Field(True, description="run rows of a job that are the same once")
    shared_prefix_attention: bool = Field(True, description="read a common prefix once for a step's rows")

    slots: int | None = Field(
        None,
        ge=1,
        le=64,
        description="shards at once, and one for starved jobs; by default as many as fill the engine",
    )
    max_rows_in_flight: int | None = Field(
        None,
        ge=1,
        description="rows in the engine's process at once; by default those of two steps, 128 at least",
    )
    max_bytes_in_flight: int = Field(
        64 << 20, ge=1, description="bytes of rows in the engine's process at once"
    )
    lease_ttl_s: float = Field(15.0, ge=0.5, le=600, description="how long a dead worker keeps a shard")
    seal_rows: int = Field(256, ge=1, description="finished rows that make a segment")
    seal_seconds: float = Field(10.0, gt=0, description="age of a finished row that makes a segment")

    rescue_seconds: float = Field(
        60.0, gt=0, description="how often to look for jobs that Redis has lost, beside when it shows"
    )

    task_memory_gb: float = Field(
        4.0, gt=0, description="memory of a plan, merge or ending that has killed a worker before"
    )
    load_timeout_s: float = Field(1800.0, gt=0, description="longest load of a model")
    stall_timeout_s: float = Field(
        60.0, gt=0, description="an engine step that takes longer is a hang, and …"
    )
    stall_token_s: float | None = Field(
        None, ge=0, description="… so much longer a token in it; by default 1 on a CPU, 0.02 on a GPU"
    )
    redis_patience_s: float = Field(60.0, ge=0, description="how long one call waits for Redis to come back")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="answer /metrics, /livez and /readyz on this port"
    )
    metrics_host: str = Field("127.0.0.1", min_length=1, description="the address of that port")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    sim_rows_per_second: float = Field(0.0, ge=0, description="simulated engine: 0 is unthrottled")
    sim_delay_ms: float = Field(0.0, ge=0, description="simulated engine: time each row takes")
    sim_load_s: float = Field(0.0, ge=0, description="simulated engine: time a load takes")
    sim_output_chars: int = Field(120, ge=1, description="simulated engine: length of an answer")
    sim_max_seqs: int = Field(64, ge=1, description="simulated engine: rows in one step")
    sim_die_after_steps: int = Field(
        0, ge=0, description="simulated engine: steps its process lives, 0: for ever"
    )
    sim_log: Path | None = Field(
        None, description="simulated engine: file that gets the id of each computed row"
    )

    @classmethod
    def load(cls, **overrides: Any) -> Self:
        """Settings with flags on top; one model by flag takes the place of several from elsewhere."""
        if overrides.get("model") is not None and overrides.get("models") is None:
            overrides["models"] = ()
        return super().load(**overrides)

    @classmethod
    def from_file(cls) -> dict[str, Any]:
        """The whole file; one model by variable takes the place of several from there."""
        common = set(ClientSettings.model_fields)
        found = read_config(common, set(cls.model_fields) - common)
        if os.environ.get("PAGEMILL_MODEL"):
            found.pop("models", None)
        return found

    @field_validator("device")
    @classmethod
    def _device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", device):
            raise ValueError(f"it must be auto, cpu, cuda or cuda:N, not {device!r}")
        return device

    @field_validator("name")
    @classmethod
    def _named(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is not None and not name.strip():
            raise ValueError("must not be empty")
        if name is not None and len(info.data.get("models", ())) > 1:
            raise ValueError("is for one model; name each of several as --model NAME=SOURCE")
        return name

    @field_validator("models", mode="before")
    @classmethod
    def _listed(cls, models: Any) -> Any:
        """A variable holds them separated by commas."""
        return tuple(filter(None, map(str.strip, models.split(",")))) if isinstance(models, str) else models

    @field_validator("models")
    @classmethod
    def _distinct(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        names = [Choice.of(model).name for model in models]
        if len(set(names)) < len(names):
            raise ValueError("two models have the same name; tell them apart as NAME=SOURCE")
        return models

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The models that may be loaded, the first one first where nothing waits."""
        choices = tuple(map(Choice.of, self.models or (self.model,)))
        return (Choice(self.name, choices[0].source),) if self.name and len(choices) == 1 else choices

    @property
    def model_name(self) -> str:
        """What jobs call the first model."""
        return self.choices[0].name
