"""An engine without a model: the same process, the same protocol, made-up text.

For load and chaos runs and for tests of everything around the engine. What it answers depends on the row
alone (its prompt, seed and parameters), so that a row computed twice gives the same text, as the real one
promises. Prompts that hold a marker misbehave on purpose:

    <<crash>>     the process is killed while the row is in a step
    <<kill>>      so is the worker, just before
    <<hang>>      the step never ends
    <<stall:MS>>  the step takes that long, once
    <<compile:MS>>  so, and the engine says that it compiles
    <<fail>>      the row ends with numeric_error
    <<slow:MS>>   the row takes that many milliseconds more
    <<memory:N>>  the process is killed when more than so many rows are in one step

A model whose source holds <<fail>> does not load.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagemill.jobs.errors import ModelError
from pagemill.worker.wire import Board

Message = dict[str, Any]
_SLOW = re.compile(r"<<slow:(\d+)>>")
_MEMORY = re.compile(r"<<memory:(\d+)>>")
_STALL = re.compile(r"<<(stall|compile):(\d+)>>")


@dataclass(slots=True)
class _Running:
    message: Message
    started: float
    due: float
    stalled: bool = False


class SimulatedEngine:
    """Steps of `sim_max_seqs` rows, each of which takes `sim_delay_ms`; at most `sim_rows_per_second`."""

    def __init__(self, config: Mapping[str, Any], board: Board, emit: Callable[[Message], None]) -> None:
        self._board, self._emit = board, emit
        self._name, self._source = str(config["model"]), str(config.get("model_source", ""))
        self._context = int(config.get("context") or 8192)
        self._load_s = float(config.get("sim_load_s", 0))
        self._delay_s = float(config.get("sim_delay_ms", 0)) / 1000
        self._interval_s = 1 / config["sim_rows_per_second"] if config.get("sim_rows_per_second") else 0.0
        self._chars = int(config.get("sim_output_chars", 120))
        self._max_seqs = int(config.get("sim_max_seqs", 64))
        self._die_after = int(config.get("sim_die_after_steps", 0))
        self._log = Path(config["sim_log"]) if config.get("sim_log") else None
        self._waiting: deque[Message] = deque()
        self._running: dict[str, _Running] = {}
        self._aborted: set[str] = set()
        self._changed = threading.Condition()
        self._next_due = 0.0
        self._figures = {"steps": 0.0, "finished": 0.0, "prompt_tokens": 0.0, "generated_tokens": 0.0}

    def load(self) -> Message:
        time.sleep(self._load_s)
        if "<<fail>>" in self._source:
            raise ModelError(f"{self._name} was told not to load.")
        return {
            "model": self._name,
            "fingerprint": f"simulated-{self._name}-{self._chars}",
            "dtype": "none",
            "device": "simulated",
            "context": self._context,
            "kv_tokens": self._max_seqs * self._context,
            "step_rows": self._max_seqs,
        }

    def submit(self, message: Message, arrived: float) -> None:
        with self._changed:
            self._waiting.append(message)
            self._changed.notify()

    def abort(self, rids: Iterable[str]) -> None:
        with self._changed:
            self._aborted.update(rids)
            self._changed.notify()

    def figures(self) -> dict[str, float]:
        return {**self._figures, "running": float(len(self._running)), "waiting": float(len(self._waiting))}

    def run(self) -> None:
        """The loop of steps; never returns."""
        while True:
            self._admit()
            now = time.monotonic()
            for rid in self._cancelled():
                self._emit({"rid": rid, "status": "aborted"})
            self._step()
            done = [rid for rid, row in self._running.items() if row.due <= now]
            for rid in done:
                row = self._running.pop(rid)
                self._emit(self._answer(row, now))
            if done and self._log is not None:
                with self._log.open("ab") as file:
                    file.write("".join(f"{rid}\n" for rid in done).encode())
            self._figures["finished"] += len(done)

    def _admit(self) -> None:
        """Fill the step; with nothing to do, or nothing due yet, wait."""
        with self._changed:
            if not self._waiting and not self._aborted:
                timeout = None
                if self._running:
                    timeout = max(0.0, min(row.due for row in self._running.values()) - time.monotonic())
                else:
                    self._board.step.write(())
                if timeout != 0.0:
                    self._changed.wait(timeout)
            now = time.monotonic()
            while self._waiting and len(self._running) < self._max_seqs:
                message = self._waiting.popleft()
                self._next_due = max(now, self._next_due + self._interval_s)
                slow = _SLOW.search(_prompt(message["row"]))
                delay = self._delay_s + (int(slow[1]) / 1000 if slow else 0.0)
                self._running[message["rid"]] = _Running(message, now, max(now + delay, self._next_due))

    def _cancelled(self) -> list[str]:
        """Rows that were aborted and are here; an abort of a row that ended already says nothing."""
        with self._changed:
            aborted, self._aborted = self._aborted, set()
            if not aborted:
                return []
            gone = [rid for rid in aborted if self._running.pop(rid, None)]
            gone += [message["rid"] for message in self._waiting if message["rid"] in aborted]
            self._waiting = deque(message for message in self._waiting if message["rid"] not in aborted)
            return gone

    def _step(self) -> None:
        if not self._running:
            return
        self._board.step.write(self._running)
        self._figures["steps"] += 1
        self._figures["step_tokens"] = sum(
            _tokens(_prompt(row.message["row"])) for row in self._running.values()
        )
        if self._die_after and self._figures["steps"] > self._die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        for row in self._running.values():
            prompt = _prompt(row.message["row"])
            if "<<kill>>" in prompt:
                os.kill(os.getppid(), signal.SIGKILL)
            if "<<crash>>" in prompt or "<<kill>>" in prompt:
                os.kill(os.getpid(), signal.SIGKILL)
            if (memory := _MEMORY.search(prompt)) is not None and len(self._running) > int(memory[1]):
                os.kill(os.getpid(), signal.SIGKILL)
            if (stall := _STALL.search(prompt)) is not None and not row.stalled:
                row.stalled = True
                self._figures["compiling"] = float(stall[1] == "compile")
                time.sleep(int(stall[2]) / 1000)
                self._figures["compiling"] = 0.0
            if "<<hang>>" in prompt:
                time.sleep(1e9)

    def _answer(self, row: _Running, now: float) -> Message:
        spec, rid = row.message["row"], row.message["rid"]
        prompt = _prompt(spec)
        used = {"prompt_tokens": _tokens(prompt), "cached_tokens": 0}
        if "<<fail>>" in prompt:
            return {
                "rid": rid,
                "status": "failed",
                "error_code": "numeric_error",
                "error_message": "It was told to fail.",
            }
        count = spec["params"].get("n", 1)
        texts = [made_up_text(prompt, spec["seed"], sample, self._chars) for sample in range(count)]
        tokens = sum(map(_tokens, texts))
        self._figures["prompt_tokens"] += used["prompt_tokens"]
        self._figures["generated_tokens"] += tokens
        return {
            "rid": rid,
            "status": "completed",
            "choices": [{"index": i, "text": text, "finish_reason": "stop"} for i, text in enumerate(texts)],
            **used,
            "completion_tokens": tokens,
            "queued_ms": 0.0,
            "first_token_ms": round((now - row.started) * 1000, 3),
            "total_ms": round((now - row.started) * 1000, 3),
        }


def _tokens(text: str) -> int:
    return 1 + len(text) // 4


def _prompt(row: Mapping[str, Any]) -> str:
    if "prompt" in row:
        return str(row["prompt"])
    if "messages" in row:
        return "\n".join(message["content"] for message in row["messages"])
    return " ".join(map(str, row["prompt_token_ids"]))


def made_up_text(prompt: str, seed: int, sample: int, chars: int) -> str:
    """What the simulated engine answers: a function of the row alone."""
    return hashlib.shake_128(f"{seed}/{sample}/{prompt}".encode()).hexdigest((chars + 1) // 2)[:chars]
