"""The engine as the worker sees it: rows in, completions out, whatever happens to its process.

The engine lives in a child process, so that the worker's event loop never waits for it and a dead engine is a
restart instead of a dead worker. The host holds every row that is down there, restarts a child that died or
hangs, and sends its rows again; a row that keeps killing it ends as `poison_row`. It may not know jobs,
leases or storage. The simulated engine sits behind this same interface.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagemill.jobs.errors import ModelError
from pagemill.worker.blame import DEATHS_ALONE, Quarantine
from pagemill.worker.credits import LEAST_ROWS, Credits
from pagemill.worker.engine_process import EngineProcess, Message
from pagemill.worker.logs import about_row
from pagemill.worker.pressure import QUIET_S, Pressure
from pagemill.worker.wire import beside, encode, row_line

log = logging.getLogger("pagemill.engine")

Sink = Callable[[Message], None]
TICK_S = 1.0
LOADS = 2  # a model that failed to load this often in a row will not load by itself
# Deaths within an hour that led to no poison row. The hunt for one takes fewer (blame.py: log2 n + 3), so an
# engine that has so many dies of itself, each time of other rows.
RESTLESS_DEATHS = 20
RESTLESS_S = 3600.0
BARREN_LIVES = 2  # lives in a row that ended without finishing a row, and with no row to suspect
# A step may take stall_timeout_s, and this much for each token in it, where nobody said otherwise: many times
# what the slowest machine of the kind needs.
SECONDS_A_TOKEN = {"cpu": 1.0, "cuda": 0.02}
PLAIN = beside()

CANARY: Message = {
    "rid": "canary",
    "row": {
        "row_index": 0,
        "custom_id": "canary",
        "kind": "completion",
        "prompt": "Hello",
        "params": {"max_tokens": 1},
        "seed": 0,
    },
    "context": None,
    "special": "text",
    "priority": 0,
    "group": "",
}


@dataclass(frozen=True, slots=True)
class HostConfig:
    """start: what the child is to load (engine_child.py). rows, bytes: most that may be in it at once.

    Where rows is None, as many as it asks for once it knows how many make a step.
    """

    start: Mapping[str, Any]
    rows: int | None = None
    bytes: int = 64 << 20
    load_timeout_s: float = 1800.0
    stall_timeout_s: float = 60.0
    stall_token_s: float | None = None
    quiet_s: float = QUIET_S
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a loaded engine said about itself. rows: most that may be in its process."""

    model: str
    fingerprint: str
    dtype: str
    device: str
    context: int
    kv_tokens: int
    rows: int
    load_seconds: float

    def described(self) -> str:
        return (
            f"model {self.model} loaded in {self.load_seconds:.1f} s, {self.dtype} on {self.device}, "
            f"context {self.context}, {self.kv_tokens} tokens of KV"
        )


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A look from outside; `figures` is the child's last word (tokens, blocks, steps)."""

    up: bool
    pid: int | None
    restarts: int
    rows_in_flight: int
    rows_limit: int
    figures: Mapping[str, float]


@dataclass(slots=True, eq=False)
class _Row:
    """A row that holds a credit. sink is None once nobody wants its completion.

    recalled: its sink is told how the row left the engine, which may be unfinished.
    """

    line: bytes
    sink: Sink | None
    sent: bool = False
    recalled: bool = False


class EngineHost:
    """Start it, submit rows, close it. Completions arrive through each row's sink, in this event loop."""

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        rows = config.rows or LEAST_ROWS
        self._credits = Credits(rows, config.bytes)
        self._rows: dict[str, _Row] = {}
        self._quarantine = Quarantine()
        self._child: EngineProcess | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._up = False
        self._figures: Mapping[str, float] = {}
        self._restarts = 0
        self._fruitful = False  # whether this life finished a row, or left one to suspect
        self._canary_sent = False  # in this life
        self._canary_deaths = 0
        self._unexplained: deque[float] = deque(maxlen=RESTLESS_DEATHS)
        self._pressure = Pressure(rows, config.quiet_s)
        self._sick = ""  # why no engine of this machine can be trusted
        self._living: asyncio.Task[None] | None = None
        self._broken: asyncio.Future[None] | None = None

    async def start(self) -> EngineInfo:
        """Load the model. Raises ModelError when it does not load."""
        assert self._living is None, "started twice"
        self._broken = asyncio.get_running_loop().create_future()
        self._ready = asyncio.get_running_loop().create_future()
        self._living = asyncio.create_task(self._live(), name="engine host")
        ends: set[asyncio.Future[Any]] = {self._ready, self._broken}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._broken.done():
            self._broken.result()
        return self._ready.result()

    async def broken(self) -> None:
        """Waits; raises ModelError when the engine can't be kept alive: the worker's end, and no job's."""
        assert self._broken is not None, "not started"
        await asyncio.shield(self._broken)

    async def submit(
        self,
        rid: str,
        row: Mapping[str, Any] | bytes,
        sink: Sink,
        told: bytes = PLAIN,
    ) -> None:
        """Hand a row down, waiting for a credit. `rid` must be new: it carries the fence of its lease.

        row: as `Row.to_dict` has it, or the JSON text of that. told: what goes beside it, of wire.py's
        `beside`.
        """
        line = row_line(rid, row if isinstance(row, bytes) else encode(dict(row)).rstrip(), told)
        await self._credits.take(len(line))
        assert rid not in self._rows, f"{rid} is already in the engine"
        self._rows[rid] = _Row(line, sink)
        self._send(rid)

    def abort(self, rids: Iterable[str]) -> None:
        """Forget rows. Their sinks are never called again; their credits return when the child lets go."""
        known = [rid for rid in rids if rid in self._rows]
        for rid in known:
            self._rows[rid].sink = None
        self._take_back(known)

    def recall(self, rids: Iterable[str]) -> None:
        """Take rows back unless they are finished: each sink is called as ever, with the completion or, where
        there is none, with the status "aborted". At once for rows that have not been sent down."""
        known = [rid for rid in rids if rid in self._rows and not self._rows[rid].recalled]
        for rid in known:
            self._rows[rid].recalled = True
        self._take_back(known)

    def under_way(self) -> set[str]:
        """Ids of the rows in the engine's running step; those of no step can be taken back for nothing."""
        return self._child.suspects() if self._child is not None and self._up else set()

    def health(self) -> EngineHealth:
        pid = self._child.pid if self._child is not None and self._up else None
        return EngineHealth(
            self._up, pid, self._restarts, len(self._rows), self._pressure.limit, self._figures
        )

    async def close(self) -> None:
        """Stop the child. Rows still down there are forgotten."""
        if self._living is not None:
            self._living.cancel()
            await asyncio.wait([self._living])
            self._living = None
        if self._child is not None:
            await self._child.close()
            self._child = None
        self._up = False
        if self._broken is not None and not self._broken.done():
            self._broken.cancel()

    # -- one life after another ------------------------------------------------------------------------

    async def _live(self) -> None:
        failed_loads = barren = 0
        while True:
            trouble = await self._one_life()
            if trouble is not None:
                failed_loads += 1
                # The first load decides at once: nothing has ever shown that it could work.
                if failed_loads >= LOADS or self._restarts == 0:
                    return self._give_up(trouble)
            else:
                failed_loads = 0
                barren = 0 if self._fruitful else barren + 1
            if self._sick:
                return self._give_up(f"{self._sick} This machine or the model's files are at fault, no row.")
            if barren >= BARREN_LIVES:
                how = self._child.how_it_ended() if self._child is not None else "died"
                return self._give_up(
                    f"The engine's process {how} {barren} times in a row without finishing a row."
                )
            self._restarts += 1
            await asyncio.sleep(0.25 * (failed_loads + barren))

    def _give_up(self, sentence: str) -> None:
        assert self._broken is not None
        self._broken.set_exception(ModelError(sentence))
        self._broken.exception()  # seen: it is raised to whoever asks

    async def _one_life(self) -> str | None:
        """Start a child and stay with it to its end. Returns what went wrong if it never got ready."""
        if self._child is not None:
            await self._child.close()
        self._child = child = EngineProcess(self._on_data, self._on_control)
        self._fruitful, self._canary_sent, self._figures = False, False, {}
        self._loaded = asyncio.get_running_loop().create_future()
        start = self._config.start
        log.info("loading model %s from %s", start.get("model"), start.get("model_source"))
        try:
            await child.start(
                {"op": "start", "rows": self._config.rows, **self._config.start}, dict(self._config.env)
            )
        except OSError as error:
            return f"The engine's process cannot be started: {error.strerror or error}."
        ended = asyncio.create_task(child.ended.wait())
        try:
            await asyncio.wait(
                [ended, self._loaded], timeout=self._config.load_timeout_s, return_when="FIRST_COMPLETED"
            )
            trouble = self._load_outcome(child, ended.done())
            if trouble is not None:
                child.kill()
                return trouble
            self._up = True
            self._resume()
            await self._stay_with(child, ended)
        finally:
            self._up = False
            ended.cancel()
        self._mourn(child)
        return None

    def _load_outcome(self, child: EngineProcess, ended: bool) -> str | None:
        loaded: asyncio.Future[Message] = self._loaded
        if not loaded.done():
            if not ended:
                return f"The model did not load within {self._config.load_timeout_s:g} s."
            words = child.last_words()
            return f"The engine's process {child.how_it_ended()} while loading the model" + (
                f": {words}" if words else "."
            )
        message = loaded.result()
        if message["op"] == "failed":
            return str(message["message"])
        self._info = info = EngineInfo(**{name: message[name] for name in EngineInfo.__slots__})
        log.info("engine ready: %s, process %d", info.described(), child.pid)
        if self._pressure.bears(info.rows):
            self._credits.resize(self._pressure.limit)
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_result(info)
        elif self._ready.result().fingerprint != info.fingerprint:
            return "The model's files changed under a running worker; start it again to serve the new ones."
        return None

    async def _stay_with(self, child: EngineProcess, ended: asyncio.Task[Any]) -> None:
        """Until it ends; kill it when its running step makes no progress for longer than its tokens explain.

        Time is counted in ticks of this loop, each at most TICK_S: a watcher that was frozen itself blames
        nobody. While the engine compiles, which it does once for a shape, none is counted.
        """
        stalled, last = 0.0, -1.0
        while not ended.done():
            await asyncio.wait([ended], timeout=TICK_S)
            self._bear(self._pressure.passed(TICK_S))
            figures = self._figures
            if figures.get("compiling"):
                continue
            step = figures.get("steps", 0.0)
            stalled = stalled + TICK_S if figures.get("running", 0) and step == last else 0.0
            last = step
            if stalled >= self._longest_step(figures.get("step_tokens", 0.0)):
                log.error("the engine made no step for %.0f s; its process is killed", stalled)
                child.kill()
                await ended

    def _longest_step(self, tokens: float) -> float:
        """Seconds that a step of so many tokens may take before it is a hang."""
        config, device = self._config, self._info.device.partition(":")[0]
        a_token = config.stall_token_s
        if a_token is None:
            a_token = SECONDS_A_TOKEN.get(device, SECONDS_A_TOKEN["cpu"])
        return config.stall_timeout_s + a_token * tokens

    def _mourn(self, child: EngineProcess) -> None:
        """The child died: judge its suspects, and mark every other row to be sent again."""
        for row in self._rows.values():
            row.sent = False
        self._take_back([rid for rid, row in self._rows.items() if row.sink is None or row.recalled])
        noted = child.suspects()
        if CANARY["rid"] in noted:
            self._canary_deaths += 1
            if self._canary_deaths >= DEATHS_ALONE:
                self._sick = f"The engine's process {child.how_it_ended()} on a known-good row, alone."
        suspects = noted & self._rows.keys()
        self._fruitful = self._fruitful or bool(suspects)
        how = child.how_it_ended()
        log.warning("the engine's process %s with %d rows in its step; starting it again", how, len(suspects))
        if child.ran_out_of_memory():
            self._bear(self._pressure.ran_out(len(suspects)))
        poison = self._quarantine.crashed(suspects)
        self._count_death(how, explained=bool(poison))
        if poison:
            self._bear(self._pressure.cleared())
        for rid in poison:
            log.error(
                "row %s is poison: a fresh engine died with it alone %d times",
                rid,
                DEATHS_ALONE,
                extra=about_row(rid),
            )
            message = f"The engine's process {how} while running this row alone, {DEATHS_ALONE} times."
            self._deliver(
                {"rid": rid, "status": "failed", "error_code": "poison_row", "error_message": message}
            )

    def _count_death(self, how: str, *, explained: bool) -> None:
        """A machine on which an engine dies again and again, of ever other rows, is sick, and no row is."""
        if explained:
            self._unexplained.clear()
            return
        now = asyncio.get_running_loop().time()
        self._unexplained.append(now)
        if len(self._unexplained) == RESTLESS_DEATHS and now - self._unexplained[0] <= RESTLESS_S:
            self._sick = f"The engine's process {how}, as {RESTLESS_DEATHS} times lately, each of other rows."

    def _bear(self, changed: bool) -> None:
        """Heed what memory bears now."""
        if changed:
            log.warning("memory: at most %d rows at once from now on", self._pressure.limit)
            self._credits.resize(self._pressure.limit)
            self._resume()

    # -- rows ------------------------------------------------------------------------------------------

    def _send(self, rid: str) -> None:
        row = self._rows[rid]
        if self._up and self._child is not None and not row.sent and not self._quarantine.holds(rid):
            row.sent = True
            self._child.send(row.line)

    def _take_back(self, rids: list[str]) -> None:
        """What has been sent down comes back by itself, once the child has heard of it."""
        sent = []
        for rid in rids:
            row = self._rows.get(rid)
            if row is not None and row.sent:
                sent.append(rid)
            else:
                self._deliver({"rid": rid, "status": "aborted"})
        if sent and self._child is not None:
            self._child.tell({"op": "abort", "rids": sent})

    def _resume(self) -> None:
        if self._quarantine.wants_canary:
            self._send_canary()
            return
        # Rows that hold a credit from before a limit was lowered wait here, so that the step is no larger.
        room = self._pressure.limit - sum(row.sent for row in self._rows.values())
        for rid, row in list(self._rows.items()):
            if room <= 0:
                return
            if not row.sent:
                self._send(rid)
                room -= row.sent

    def _send_canary(self) -> None:
        """Once a life: an engine that is handed a row which it already has takes that for a fault."""
        if self._up and self._child is not None and not self._canary_sent:
            self._canary_sent = True
            self._child.send(encode(CANARY))

    def _on_data(self, message: Message) -> None:
        self._fruitful = True
        if message["rid"] == CANARY["rid"]:
            self._judge_canary(message)
        else:
            self._deliver(message)

    def _deliver(self, message: Message) -> None:
        rid = str(message["rid"])
        row = self._rows.get(rid)
        if row is None:
            return
        if message["status"] == "aborted" and row.sink is not None and not row.recalled:
            # An abort of an earlier row of that id, which had ended when the abort came down.
            row.sent = False
            self._send(rid)
            return
        self._end(rid)
        if row.sink is not None:
            row.sink(message)

    def _end(self, rid: str) -> None:
        row = self._rows.pop(rid)
        self._credits.give(len(row.line))
        # Where more rows hold credits than may be down now, others wait to be sent: memory ran out, or the
        # engine came back with a smaller step.
        if self._quarantine.done(rid) or len(self._rows) >= self._pressure.limit:
            self._resume()

    def _judge_canary(self, message: Message) -> None:
        if message["status"] == "completed":
            self._canary_deaths = 0
            self._quarantine.vouch()
            self._resume()
        else:
            self._sick = (
                f"The engine fails on a known-good row: {message.get('error_message', message['status'])}"
            )
            if self._child is not None:
                self._child.kill()

    def _on_control(self, message: Message) -> None:
        if message["op"] == "beat":
            self._figures = message["figures"]
        elif message["op"] in ("ready", "failed") and not self._loaded.done():
            self._loaded.set_result(message)
