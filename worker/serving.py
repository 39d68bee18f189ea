"""Which model the engine serves: loads the first, changes to another when its turn comes, notices the end.

    load       a process of its own; what a model leaves behind in memory goes with it
    stay       until the engine cannot be kept alive, or it is another model's turn (turns.py)
    change     no row is begun any more, those under way are finished, shards handed back, the process ended

A model that does not load, or cannot be kept alive, is this worker's trouble and no job's: its jobs are told,
it is left alone for a while, and the worker goes on with the others it may load. When there is none, the
worker ends. This room may not know how shards run, nor what decides a turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pagemill.jobs.errors import ModelError, PagemillError
from pagemill.jobs.status import Want
from pagemill.worker.engine_host import EngineHost, EngineInfo, HostConfig
from pagemill.worker.settings import Choice
from pagemill.worker.tasks import Leasing
from pagemill.worker.turns import Turns
from pagemill.worker.workshop import Workshop

log = logging.getLogger("pagemill.worker")

LOOK_S = 1.0
REST_S = 600.0  # how long a model that failed here is left alone, where there are others


class Serving:
    """Runs until the worker leaves. `phase` and `message` are for the registry."""

    def __init__(self, shop: Workshop, leasing: Leasing, config: Callable[[Choice], HostConfig]) -> None:
        self._shop, self._leasing, self._config = shop, leasing, config
        self._choices = {choice.name: choice for choice in shop.settings.choices}
        self._turns = Turns(shop.settings.model_slice_s)
        self._known: dict[str, EngineInfo] = {}  # what has been loaded here says what it can run
        self._failed: dict[str, tuple[float, str]] = {}  # until when, and what was wrong
        self.phase, self.message = "starting", ""

    @property
    def models(self) -> tuple[str, ...]:
        """Those that may be loaded, without those that failed here."""
        now = asyncio.get_running_loop().time()
        return tuple(name for name in self._choices if self._failed.get(name, (0.0, ""))[0] <= now)

    async def run(self, say: Callable[[], object], ready: Callable[[], None] | None) -> None:
        """Until cancelled. Raises ModelError when there is no model left to serve.

        say: the registry should hear of us now. ready: called after the first load.
        """
        model = await self._first()
        while True:
            self.phase, self._leasing.loaded = "starting", model
            say()
            try:
                await self._load(model)
                say()
                if ready is not None:
                    ready()
                    ready = None
                following = await self._stay(model)
            except ModelError as error:
                following = await self._give_up(model, error)
            await self._clear()
            log.info("model %s makes room for %s", model, following)
            self._shop.figures.model_changes.inc()
            model = following

    async def _first(self) -> str:
        """What somebody waits for, and nobody else may serve, if there is such a model; else the first of
        the list."""
        names = list(self._choices)
        if len(names) == 1:
            return names[0]
        wants = await self._wants()
        return max(
            names, key=lambda name: (wants[name].alone > 0, wants[name].unserved > 0, wants[name].priority)
        )

    async def _load(self, model: str) -> None:
        self._shop.engine = EngineHost(self._config(self._choices[model]))
        info = await self._shop.engine.start()
        self._known[model], self._leasing.engine, self.phase = info, info, "ready"
        if self._failed.pop(model, None):
            self.message = ""
        self._leasing.wake()

    async def _stay(self, model: str) -> str:
        """The model whose turn it is next. Raises ModelError when the engine can't be kept alive."""
        clock = asyncio.get_running_loop().time
        began = clock()
        broken = asyncio.create_task(self._shop.engine.broken(), name="engine")
        try:
            while True:
                pause = None if len(self._choices) == 1 else LOOK_S
                await asyncio.wait({broken}, timeout=pause)
                if broken.done():
                    broken.result()
                looking = asyncio.create_task(self._wants(), name="wants")
                await asyncio.wait({broken, looking}, return_when=asyncio.FIRST_COMPLETED)
                if not looking.done():
                    looking.cancel()
                    continue
                load_s = self._known[model].load_seconds
                wants, busy = looking.result(), self._leasing.computing > 0
                if model not in wants:
                    continue
                if (following := self._turns.next(clock(), wants, model, began, load_s, busy)) is not None:
                    return following
        finally:
            broken.cancel()

    async def _wants(self) -> dict[str, Want]:
        found = {}
        for model in self.models:
            known = self._known.get(model)
            try:
                found[model] = await self._shop.state.wanted(
                    model,
                    self._shop.settings.worker_id,
                    known.fingerprint if known else "",
                    known.context if known else 0,
                )
            except PagemillError as error:
                log.warning("who waits for %s is not known: %s", model, error)
                found[model] = Want()
        return found

    async def _clear(self) -> None:
        """The engine's process is gone afterwards, and with it the model's memory."""
        await self._leasing.wind_up()
        await self._shop.engine.close()

    async def _give_up(self, model: str, error: ModelError) -> str:
        """The next model to try. Raises the error when it was the last one."""
        what = "model_load_error" if self._leasing.engine is None else "engine failure"
        sentence = f"{what} on worker {self._shop.settings.worker_id}: {error}"
        self._failed[model] = (asyncio.get_running_loop().time() + REST_S, sentence)
        self.message = str(error)
        left = self.models
        if not left:
            self.phase = "sick"
        await self._tell_waiting_jobs(model, sentence)
        if not left:
            raise error
        log.error("%s is not served for %.0f s: %s", model, REST_S, error)
        wants = await self._wants()
        return max(left, key=lambda name: (wants[name].alone, wants[name].unserved, wants[name].jobs))

    async def _tell_waiting_jobs(self, model: str, why: str) -> None:
        """A model that does not load is this worker's fault, never a job's; but jobs say why they wait."""
        try:
            async with asyncio.timeout(5.0):
                for job in await self._shop.state.unfinished(model):
                    await self._shop.tell(job, why)
        except (PagemillError, TimeoutError) as trouble:
            log.warning("jobs could not be told: %s", trouble)
