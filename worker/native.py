"""The real engine as a backend of the engine's process.

It prepares rows in the thread that brings them and runs the engine's steps in the main one, writing the
rows of each step on the board before the step is launched. It may not know the pipe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagemill.engine.batch import Batch
from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine, build_engine
from pagemill.engine.request import Completion, Request, SamplingParams
from pagemill.jobs.errors import RowFault
from pagemill.jobs.row import Row
from pagemill.worker.prepare import Limits, answer, failure, prepare
from pagemill.worker.wire import Board

Message = dict[str, Any]
LOOK_S = 0.25
# What is handed on to the engine as it is; both sides call it the same.
ENGINE_SETTINGS = (
    "dtype",
    "device",
    "quantization",
    "kv_cache_dtype",
    "kv_cache_gb",
    "max_num_seqs",
    "prefix_cache",
    "prefix_order",
    "long_rows_first",
    "learned_lengths",
    "identical_rows",
    "shared_prefix_attention",
    "deterministic",
    "context",
    "threads",
)
FIGURES = (
    "waiting",
    "rows_allowed",
    "finished",
    "prompt_tokens",
    "cached_tokens",
    "hit_rate",
    "prefilled_tokens",
    "identical_rows",
    "generated_tokens",
    "preemptions",
    "blocks_used",
    "blocks_total",
    "batch_fill",
    "tokens_per_second",
    "schedule_seconds",
    "prepare_seconds",
    "forward_seconds",
    "sample_seconds",
    "finish_seconds",
)


@dataclass(slots=True, eq=False)
class _Row:
    """A row of the worker's: as many samples as it asked for, answered together."""

    rid: str
    samples: list[str]
    arrived: float
    done: dict[str, Completion]


class NativeEngine:
    def __init__(self, config: Mapping[str, Any], board: Board, emit: Callable[[Message], None]) -> None:
        self._config, self._board, self._emit = config, board, emit
        self._rows: dict[str, _Row] = {}  # by request id
        self._inbox: list[list[Request]] = []
        self._aborts: list[str] = []
        self._preparing = ""
        self._changed = threading.Condition()
        self._figures: dict[str, float] = {}
        self._looked = 0.0
        self._step_tokens = 0

    def load(self) -> Message:
        config = self._config
        self._engine: Engine = build_engine(engine_config(config, config["model_source"]))
        _warm_up(self._engine)
        self._engine.before_step = self._note
        info = self._engine.model_info
        self._limits = Limits(info.context, info.generation_defaults)
        return {
            "model": config["model"],
            "fingerprint": info.fingerprint,
            "dtype": info.dtype,
            "device": info.device,
            "context": info.context,
            "kv_tokens": info.kv_tokens,
            "step_rows": self._engine.limits.max_num_seqs,
        }

    def submit(self, message: Message, arrived: float) -> None:
        rid = self._preparing = message["rid"]
        self._board.prepare.write((rid,))
        requests = prepare(
            rid,
            Row.from_dict(message["row"]),
            self._engine.tokenizer,
            self._limits,
            context=message["context"],
            special=message["special"],
            priority=message["priority"],
            group=message["group"],
        )
        self._board.prepare.write(())
        if isinstance(requests, RowFault):
            self._emit(failure(rid, requests))
            return
        row = _Row(rid, [request.request_id for request in requests], arrived, {})
        with self._changed:
            self._preparing = ""
            for request in requests:
                self._rows[request.request_id] = row
            self._inbox.append(requests)
            self._changed.notify()

    def abort(self, rids: Iterable[str]) -> None:
        with self._changed:
            self._aborts.extend(rids)
            self._changed.notify()

    def figures(self) -> dict[str, float]:
        """Called at any time: what a watchdog goes by is as of now, the rest as of the last look."""
        return {
            **self._figures,
            "running": float(len(self._rows)),
            "steps": float(self._engine.num_steps),
            "step_tokens": float(self._step_tokens),
        }

    def run(self) -> None:
        engine = self._engine
        while True:
            for requests, aborts in self._news():
                for request in requests:
                    engine.add(request)
                for rid in aborts:
                    engine.abort(rid)
            for completion in engine.step():
                self._settle(completion)
            self._look()

    def _news(self) -> list[tuple[list[Request], list[str]]]:
        """What came since the last step; with nothing to run, wait for it."""
        with self._changed:
            if not self._inbox and not self._engine.has_work:
                self._board.step.write(())
                self._look()
                self._changed.wait()
            inbox, self._inbox = self._inbox, []
            known = [rid for rid in self._aborts if rid in self._rows]
            samples = [sample for rid in known for sample in self._rows[rid].samples]
            # The one that is being tokenised is not here yet; any other that is not here has ended.
            self._aborts = [rid for rid in self._aborts if rid == self._preparing]
        return [(request, []) for request in inbox] + [([], samples)]

    def _note(self, batch: Batch) -> None:
        self._step_tokens = batch.num_tokens
        # Rows that share one of its sequences would end the process as well: suspects all.
        names = self._engine.request_ids(batch)
        self._board.step.write(dict.fromkeys(self._rows[name].rid for name in names))

    def _settle(self, completion: Completion) -> None:
        with self._changed:
            row = self._rows.pop(completion.request_id)
        row.done[completion.request_id] = completion
        if len(row.done) == len(row.samples):
            completions = [row.done[sample] for sample in row.samples]
            self._emit(answer(row.rid, completions, self._engine.tokenizer, row.arrived))

    def _look(self) -> None:
        """Four times a second at most: a snapshot costs as much as a small part of a step."""
        now = time.monotonic()
        if now < self._looked + LOOK_S and self._engine.has_work:
            return
        self._looked = now
        figures = self._engine.metrics()
        self._figures = {name: float(getattr(figures, name)) for name in FIGURES}


def engine_config(settings: Mapping[str, Any], source: str) -> EngineConfig:
    """The worker's settings as the engine calls them; source: the model's files."""
    return EngineConfig(model=source, **{name: settings[name] for name in ENGINE_SETTINGS})


def _warm_up(engine: Engine) -> None:
    """Two steps over one throw-away row: kernels are compiled at their first use, for seconds where the disk
    does not hold them yet, and belong to loading. A watchdog would take the first row's step for a hang.
    """
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    for _ in engine.run([Request("warm-up", (0, 0), sampling, cache_salt="warm-up")]):
        pass
