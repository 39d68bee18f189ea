"""The continuous-batching engine: token ids in, token ids and text out. It knows kernels only.

Start with request.py (what enters and leaves), sequence.py, batch.py; README.md has the reading order.
"""

from pagemill.engine.config import EngineConfig, ModelInfo, SchedulerConfig
from pagemill.engine.errors import EngineError, EngineFailed, ModelLoadError, OutOfMemory
from pagemill.engine.metrics import EngineMetrics
from pagemill.engine.request import (
    Completion,
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    Timings,
    TokenLogprob,
    Usage,
)

__all__ = [
    "Completion",
    "Delta",
    "EngineConfig",
    "EngineError",
    "EngineFailed",
    "EngineMetrics",
    "FinishReason",
    "ModelInfo",
    "ModelLoadError",
    "OutOfMemory",
    "Request",
    "SamplingParams",
    "SchedulerConfig",
    "Timings",
    "TokenLogprob",
    "Usage",
]
