"""Whether this machine can do work at all: a worker whose disk is full holds nothing that others could do.

A full disk is waited out for a while like any refusal of the store. When it stays full, tasks are handed back
and none is taken until a probe (some megabytes of scratch, and the store's own check) goes through. This room
may not know tasks or leases.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable

from pagemill.jobs.errors import DiskFull, PagemillError, StorageError

log = logging.getLogger("pagemill.worker")

PATIENCE_S = 60.0  # with a full disk, before a task is handed back
PROBE_S = 15.0
PROBE_BYTES = 16 << 20


class Unfit(PagemillError):
    """This machine cannot do the task; another one may."""


class Fitness:
    """message: what is wrong with the machine, "" while nothing is. check: asks the store, and blocks."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._next = 0.0
        self.message = ""

    def weigh(self, error: StorageError, seconds: float) -> None:
        """A storage call has failed like this for so long. Raises Unfit when it is the machine."""
        if isinstance(error, DiskFull) and seconds >= PATIENCE_S:
            self.doubt(error)
            raise Unfit(str(error)) from error

    def doubt(self, error: DiskFull) -> None:
        """Take nothing more until a probe goes through."""
        if not self.message:
            log.error("nothing is leased while the disk is full: %s", error)
        self.message, self._next = str(error), time.monotonic() + PROBE_S

    async def fit(self) -> bool:
        """Whether tasks may be taken. Probes now and then while they may not."""
        if self.message and time.monotonic() >= self._next:
            self._next = time.monotonic() + PROBE_S
            try:
                await asyncio.to_thread(self._probe)
            except (OSError, StorageError) as error:
                log.warning("still unfit: %s", error)
            else:
                log.info("there is room again: tasks are taken")
                self.message = ""
        return not self.message

    def _probe(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
        self._check()
