"""What a worker can be told: flags first, then PAGEMILL_* variables, then these defaults.

It extends the client's settings, so both sides read the same names for Redis and the store. This room
may not know how any of it is used.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from pagemill.jobs.settings import ClientSettings


def default_worker_id() -> str:
    """Unique among running workers: two on one machine differ, and so do two lives of one container."""
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"


class WorkerSettings(ClientSettings):
    """Everything a worker reads. Seconds and rows unless a name says otherwise."""

    model: str = Field("smollm2", description="smollm2, a directory, a .gguf file, or a hub name")
    name: str | None = Field(None, description="the name jobs ask for; by default the model's own")
    worker_id: str = Field(default_factory=default_worker_id, description="how this worker signs leases")

    engine: Literal["native", "simulated"] = Field("native", description="simulated: load and chaos runs")
    dtype: str = Field("auto", description="auto, float32, bfloat16, …")
    device: str = Field("auto", description="auto, cpu, cuda")
    quantization: Literal["int8"] | None = Field(None, description="int8: dense layers in 8-bit integers")
    kv_cache_gb: float = Field(1.0, gt=0, description="memory for keys and values")
    context: int | None = Field(None, ge=1, description="hold less than the model's own context")
    threads: int | None = Field(None, ge=1, description="threads of the engine's arithmetic")
    max_num_seqs: int | None = Field(None, ge=1, description="rows in one step of the engine")
    prefix_cache: bool = True
    shared_prefix_attention: bool = True

    slots: int = Field(2, ge=1, le=64, description="shards at once; one more serves starved jobs")
    max_rows_in_flight: int = Field(128, ge=1, description="rows in the engine's process at once")
    max_bytes_in_flight: int = Field(
        64 << 20, ge=1, description="bytes of rows in the engine's process at once"
    )
    lease_ttl_s: float = Field(15.0, ge=0.5, le=600, description="how long a dead worker keeps a shard")
    seal_rows: int = Field(256, ge=1, description="finished rows that make a segment")
    seal_seconds: float = Field(10.0, gt=0, description="age of a finished row that makes a segment")

    rescue_seconds: float = Field(
        60.0, gt=0, description="how often to look for jobs that Redis has lost, beside when it shows"
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
        None, ge=0, le=65535, description="Prometheus figures on this loopback port"
    )
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

    @field_validator("name")
    @classmethod
    def _named(cls, name: str | None) -> str | None:
        if name is not None and not name.strip():
            raise ValueError("must not be empty")
        return name

    @property
    def model_name(self) -> str:
        """What jobs call this model: the given name, else a path's last part, else the model as written."""
        if self.name:
            return self.name
        path = Path(self.model)
        if path.exists():
            return path.resolve().name.removesuffix(".gguf")
        return self.model
