"""One worker from start to end: what it needs is opened, what it holds is handed back, whatever ends it.

    Redis, store        checked first: a worker that cannot reach them says so and ends
    heartbeat thread    renews leases
    serving             the engine's process and the model in it; plans and finalizing run while it loads
    arq                 brings tickets; a ticket wakes the leasing loop and holds no work
    upkeep              registry, progress, sweeping, once a second
    leasing             the work
    rescue              jobs that Redis has lost, back from their objects

`run_worker` is the whole worker, for embedding; `main` is the process around it. This room may not know how
any of them does its part.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from pagemill.jobs.errors import PagemillError
from pagemill.jobs.failures import report
from pagemill.jobs.script import connection
from pagemill.jobs.state import State
from pagemill.jobs.storage import Storage, open_storage
from pagemill.worker.endpoints import Endpoints
from pagemill.worker.engine_host import EngineHost, HostConfig
from pagemill.worker.lease import Heartbeat
from pagemill.worker.logs import set_up_logging
from pagemill.worker.metrics import Figures
from pagemill.worker.serving import Serving
from pagemill.worker.settings import Choice, WorkerSettings
from pagemill.worker.tasks import Leasing
from pagemill.worker.threads import thread_variables
from pagemill.worker.ticketing import Ticketing
from pagemill.worker.upkeep import Upkeep
from pagemill.worker.workshop import Workshop

log = logging.getLogger("pagemill.worker")

CANCEL_AGAIN_S = 0.5
LEAVE_S = 3.0  # for sealing what is finished; what takes longer is computed again by the next holder


async def run_worker(
    settings: WorkerSettings,
    *,
    stop: asyncio.Event | None = None,
    ready: Callable[[], None] | None = None,
) -> None:
    """Be a worker until `stop` is set, then seal and hand back what is held.

    ready: called once the model is loaded and shards are leased. Raises PagemillError with one clear
    sentence: ModelError when the model does not load or its process cannot be kept alive, RedisUnavailable,
    StorageError and ProtocolMismatch when the surroundings do not serve at the start. Redis or the store
    going away later is waited out.
    """
    stop = stop or asyncio.Event()
    async with AsyncExitStack() as stack:
        storage = await _checked_storage(settings)
        await _check_redis(settings)
        # Once it works, Redis being away is weather: calls wait until it is back.
        state = State(connection(settings.redis_url), patience_s=math.inf)
        stack.push_async_callback(state.close)
        figures = Figures()
        heartbeat = Heartbeat(settings.redis_url, settings.worker_id, settings.lease_ttl_s)
        heartbeat.start()
        stack.push_async_callback(heartbeat.close)
        engine = EngineHost(host_config(settings, settings.choices[0]))
        shop = Workshop(settings, state, storage, engine, heartbeat, figures)
        stack.push_async_callback(lambda: shop.engine.close())
        await _work(shop, stop, ready)


async def _work(shop: Workshop, stop: asyncio.Event, ready: Callable[[], None] | None) -> None:
    settings = shop.settings
    names = [choice.name for choice in settings.choices]
    leasing = Leasing(shop, names)
    serving = Serving(shop, leasing, partial(host_config, settings))
    upkeep = Upkeep(shop, leasing, serving)
    ticketing = [Ticketing(settings.redis_url, name, leasing) for name in names]
    endpoints = Endpoints(shop.figures.registry, upkeep.readiness)
    if settings.metrics_port is not None:
        url = endpoints.serve(settings.metrics_host, settings.metrics_port)
        log.info("metrics on %s/metrics, beside /livez and /readyz", url)
    log.info("worker %s starts: %s, store %s", settings.worker_id, ", ".join(names), shop.storage.url)
    ending = [
        asyncio.create_task(stop.wait(), name="stop"),
        asyncio.create_task(serving.run(upkeep.hurry, ready), name="serving"),
        asyncio.create_task(upkeep.run(), name="upkeep"),
        asyncio.create_task(leasing.run(), name="leasing"),
        *(asyncio.create_task(tickets.run(), name="tickets") for tickets in ticketing),
        asyncio.create_task(shop.rescue.run(leasing.jobs, leasing.wake), name="rescue"),
    ]
    try:
        done, _ = await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        serving.phase = "draining"
        await leasing.leave(LEAVE_S)
        await cancelled(ending)
        await upkeep.close()
        for tickets in ticketing:
            await tickets.close()
        endpoints.close()
        log.info("worker %s has left", settings.worker_id)


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Returns when all of them have ended.

    Asked more than once: on Python 3.11 `asyncio.wait_for` loses a cancel that arrives together with what it
    waits for, and redis-py calls it for every command that arq sends.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)


async def _checked_storage(settings: WorkerSettings) -> Storage:
    storage = open_storage(settings.store, settings.storage_options())
    await asyncio.to_thread(storage.check)
    return storage


async def _check_redis(settings: WorkerSettings) -> None:
    state = await State.connect(settings.redis_url, patience_s=settings.redis_patience_s)
    try:
        await state.check_protocol()
    finally:
        await state.close()


def host_config(settings: WorkerSettings, choice: Choice | None = None) -> HostConfig:
    """What the engine's process is told (engine_child.py), and within which limits it is kept."""
    choice = choice or settings.choices[0]
    start: dict[str, Any] = {
        "engine": settings.engine,
        "model": choice.name,
        "model_source": choice.source,
        "dtype": settings.dtype,
        "device": settings.device,
        "quantization": settings.quantization,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "kv_cache_gb": settings.kv_cache_gb,
        "context": settings.context,
        "threads": settings.threads,
        "max_num_seqs": settings.max_num_seqs,
        "prefix_cache": settings.prefix_cache,
        "deterministic": settings.deterministic,
        "prefix_order": settings.prefix_order,
        "long_rows_first": settings.long_rows_first,
        "learned_lengths": settings.learned_lengths,
        "identical_rows": settings.identical_rows,
        "shared_prefix_attention": settings.shared_prefix_attention,
        "sim_rows_per_second": settings.sim_rows_per_second,
        "sim_delay_ms": settings.sim_delay_ms,
        "sim_load_s": settings.sim_load_s,
        "sim_output_chars": settings.sim_output_chars,
        "sim_max_seqs": settings.sim_max_seqs,
        "sim_die_after_steps": settings.sim_die_after_steps,
        "sim_log": str(settings.sim_log) if settings.sim_log else None,
    }
    return HostConfig(
        start=start,
        rows=settings.max_rows_in_flight,
        bytes=settings.max_bytes_in_flight,
        load_timeout_s=settings.load_timeout_s,
        stall_timeout_s=settings.stall_timeout_s,
        stall_token_s=settings.stall_token_s,
        # Every arithmetic library in there reads it; two that each take all cores ruin each other.
        env=thread_variables(settings.threads),
    )


async def _run_until_signal(settings: WorkerSettings) -> int:
    """0 after a signal, or the exit code of what went wrong, which is told on stderr."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def asked(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)  # asked twice: at once; the engine's process notices by itself
        log.info("%s: handing back", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked, number)
    try:
        await run_worker(settings, stop=stop)
    except Exception as error:
        return report(error)
    return 0


def main(settings: WorkerSettings | None = None) -> int:
    """The process of one worker. Does not return normally: see below."""
    try:
        settings = settings or WorkerSettings.load()
    except PagemillError as error:
        return report(error)
    set_up_logging(
        settings.log_level, settings.log_format, worker=settings.worker_id, secrets=settings.secrets()
    )
    runner = asyncio.Runner()
    code = runner.run(_run_until_signal(settings))
    # Threads may still sit in a storage call that takes a minute to give up. Nothing that they could write
    # counts any more (their fences are gone), so they are not waited for.
    logging.shutdown()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
