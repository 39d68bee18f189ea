"""What a file's rows would take on a model, without loading its weights: templates, lengths, tokens, memory,
time.

Rows are rendered and tokenised as the engine's process does it, by the same function, so what is said of a
row here is what would become of it there. Time is arithmetic over two measured speeds of this machine, of
multiplying and of reading memory, and so a guide, not a promise; a measured rate is better, where there is
one. This room may not know lines or files.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from pagemill.engine.run.device import resolve_dtype
from pagemill.engine.run.memory import size_text
from pagemill.engine.run.preview import Sizes, preview
from pagemill.engine.tokenizer import Tokenizer
from pagemill.jobs.errors import ModelError, RowFault
from pagemill.jobs.order import expected_output
from pagemill.jobs.render import span
from pagemill.jobs.row import Row
from pagemill.worker.models import resolve_model
from pagemill.worker.native import engine_config
from pagemill.worker.prepare import Limits, prepare
from pagemill.worker.settings import WorkerSettings

MEASURED_S: Final = 0.1
SIDE: Final = 512
BLOCK_BYTES: Final = 64 << 20
DEFAULT_ROWS: Final = 64
"""Rows in one step, where nobody says (EngineConfig.max_num_seqs)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of the rows that can be run. Tokens, bytes, seconds; expected_completion_tokens takes an answer whose
    end is left to the model for 256 tokens, as the plan does. Prompts are counted as if none had a beginning
    in common, so a prefix cache can only do better.

    rows_at_once: how many rows of the average length the key-value memory holds, at most one step's.
    seconds: None where the model does not fit.
    """

    rows: int
    prompt_tokens: int
    longest_prompt: int
    expected_completion_tokens: int
    most_completion_tokens: int
    longest_row: int
    kv_bytes_longest_row: int
    kv_bytes_all_at_once: int
    kv_bytes_here: int | None
    rows_at_once: int | None
    seconds: float | None
    most_seconds: float | None


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of this machine: multiply-adds count as two operations."""

    operations_per_second: float
    bytes_per_second: float


class Appraiser:
    """One model's word on rows; see `pagemill.jobs.validate.Appraisal`.

    Raises ModelError where the model is not here or would not run at all. A model that does not fit is
    appraised by its own context, and no time is given.
    """

    def __init__(self, settings: WorkerSettings, tokens_per_second: float | None = None) -> None:
        path = resolve_model(settings.model, fetch=False)
        config = engine_config(settings.model_dump(), str(path))
        found = preview(config)
        if found.sizes is None or found.chat_template is None:
            raise ModelError(f"{settings.model} cannot be run: {found.reason or 'its tokenizer is missing.'}")
        self.reason = found.reason
        self._sizes: Sizes = found.sizes
        self._kv_tokens = found.kv_tokens
        self._dtype = resolve_dtype(config.dtype)
        self._step_rows = config.max_num_seqs or DEFAULT_ROWS
        self._speed = tokens_per_second
        self._tokenizer = Tokenizer.from_path(path)
        most = found.context or found.sizes.own_context
        self._limits = Limits(min(most, settings.context or most), {})
        self._rows = self._prompt = self._longest_prompt = 0
        self._expected = self._most = self._longest = 0

    def check(self, row: Row) -> RowFault | None:
        """The row's fault with this model, or None: then it is counted."""
        made = prepare("row", row, self._tokenizer, self._limits)
        if isinstance(made, RowFault):
            return made
        prompt, most = len(made[0].prompt_token_ids), made[0].sampling.max_tokens
        self._rows += 1
        self._prompt += prompt
        self._longest_prompt = max(self._longest_prompt, prompt)
        self._most += most * len(made)
        self._expected += min(expected_output(row), most * len(made))
        self._longest = max(self._longest, prompt + most)
        return None

    def estimate(self) -> Estimate:
        """What the rows seen so far would take."""
        token = self._sizes.kv_token_bytes
        average = max(1, (self._prompt + self._expected) // max(1, self._rows))
        at_once = None
        if self._kv_tokens is not None:
            at_once = max(1, min(self._step_rows, self._kv_tokens // average, self._rows))
        return Estimate(
            rows=self._rows,
            prompt_tokens=self._prompt,
            longest_prompt=self._longest_prompt,
            expected_completion_tokens=self._expected,
            most_completion_tokens=self._most,
            longest_row=self._longest,
            kv_bytes_longest_row=self._longest * token,
            kv_bytes_all_at_once=self._step_rows * average * token,
            kv_bytes_here=None if self._kv_tokens is None else self._kv_tokens * token,
            rows_at_once=at_once,
            seconds=self._seconds(self._expected, at_once),
            most_seconds=self._seconds(self._most, at_once),
        )

    def _seconds(self, completion: int, at_once: int | None) -> float | None:
        if self._speed is not None:
            return completion / self._speed
        if at_once is None:
            return None
        return run_seconds(self._sizes, self._prompt, completion, at_once, measured(self._dtype))

    def document(self) -> dict[str, Any]:
        """The estimate as JSON; reason: why the model does not fit here, null where it does."""
        return {**asdict(self.estimate()), "reason": self.reason}

    def fields(self) -> dict[str, str]:
        """The estimate for people."""
        found = self.estimate()
        kv = f"{size_text(found.kv_bytes_longest_row)} for the longest row of {found.longest_row:,} tokens, "
        kv += f"{size_text(found.kv_bytes_all_at_once)} for {self._step_rows} rows of average length"
        if found.kv_bytes_here is not None:
            kv += f"; {size_text(found.kv_bytes_here)} here, {found.rows_at_once} rows at once"
        seconds, most = found.seconds, found.most_seconds
        known = (
            "at the given rate" if self._speed else "on this machine, by arithmetic: a guide, not a promise"
        )
        return {
            "prompts": f"{found.prompt_tokens:,} tokens, the longest {found.longest_prompt:,}",
            "answers": f"about {found.expected_completion_tokens:,} tokens, at most "
            f"{found.most_completion_tokens:,}",
            "KV memory": kv,
            "time": "" if seconds is None else f"about {span(seconds)}, at most {span(most or 0)} {known}",
            "does not fit": self.reason or "",
        }


_measured: dict[torch.dtype, Speeds] = {}


def measured(dtype: torch.dtype) -> Speeds:
    """How fast this machine multiplies matrices and reads memory; takes a fifth of a second, once."""
    if dtype not in _measured:
        left = torch.ones(SIDE, SIDE, dtype=dtype)
        block = torch.ones(BLOCK_BYTES // 4, dtype=torch.float32)
        multiply = _each_seconds(lambda: torch.mm(left, left))
        read = _each_seconds(lambda: block.sum())
        _measured[dtype] = Speeds(2 * SIDE**3 / multiply, BLOCK_BYTES / read)
    return _measured[dtype]


def _each_seconds(work: Any) -> float:
    work()
    began, times = time.perf_counter(), 0
    while time.perf_counter() - began < MEASURED_S:
        work()
        times += 1
    return (time.perf_counter() - began) / times


def run_seconds(sizes: Sizes, prompt: int, completion: int, at_once: int, speeds: Speeds) -> float:
    """The roofline: a prompt costs its multiplications; a step of decoding those of its rows, or reading the
    weights once, whichever takes longer."""
    token = 2 * sizes.parameters / speeds.operations_per_second
    step = max(sizes.weight_bytes / speeds.bytes_per_second, at_once * token)
    return prompt * token + completion / at_once * step


def appraise(model: str, context: int | None, tokens_per_second: float | None) -> Appraiser:
    """What `pagemill validate --model` asks."""
    settings = WorkerSettings.load(model=model, context=context)
    return Appraiser(settings, tokens_per_second)
