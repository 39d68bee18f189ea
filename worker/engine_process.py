"""One life of the engine's process: start it, talk to it, notice its end.

It owns the two socket pairs, the board and the exit code of one child. It may not know rows, credits or what
to do about a death: engine_host.py does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pagemill.worker.wire import Board, Lines, board_file, decode, encode

log = logging.getLogger("pagemill.engine")

Message = dict[str, Any]
LAST_WORDS = 20
OUT_OF_MEMORY = 6  # how a child ends that noticed it itself (engine_child.py)


class _Channel(asyncio.Protocol):
    """Our end of one pair. It reads whatever else happens, so that the child never blocks on writing."""

    def __init__(self, on_line: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        self._on_line, self._on_end, self._lines = on_line, on_end, Lines()

    def data_received(self, data: bytes) -> None:
        for line in self._lines.feed(data):
            self._on_line(decode(line))

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()


class EngineProcess:
    """A started child. `on_data` and `on_control` get its messages, in this event loop.

    `ended` is done when the process is gone and everything that it said has been read.
    """

    def __init__(self, on_data: Callable[[Message], None], on_control: Callable[[Message], None]) -> None:
        self._on_data, self._on_control = on_data, on_control
        self._words: deque[str] = deque(maxlen=LAST_WORDS)
        self._data: asyncio.WriteTransport | None = None
        self._unsent: list[bytes] = []
        self._control: asyncio.WriteTransport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._board: Board | None = None
        self._closed = [asyncio.Event(), asyncio.Event()]
        self._watching: asyncio.Task[None] | None = None
        self._killed = False  # by us
        self.ended = asyncio.Event()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, start: Message, env: dict[str, str]) -> None:
        """Start the process and tell it what to load; its `ready` or `failed` arrives on control."""
        ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
        try:
            await self._spawn(theirs, env)
            self._data = await self._connect(ours[0], self._on_data, self._closed[0])
            self._control = await self._connect(ours[1], self._on_control, self._closed[1])
        except BaseException:
            self.kill()
            for end in ours:
                end.close()
            raise
        finally:
            for end in theirs:
                end.close()
        self._watching = asyncio.create_task(self._watch(), name="engine process")
        self.tell(start)

    async def _spawn(self, ends: Sequence[socket.socket], env: dict[str, str]) -> None:
        fd = board_file()
        try:
            self._board = Board(fd)
            fds = (*(end.fileno() for end in ends), fd)
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pagemill.worker.engine_child", *map(str, fds)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=fds,
                env={**os.environ, **env},
                start_new_session=True,  # ^C at the terminal is the worker's to handle
            )
        finally:
            os.close(fd)

    async def _connect(
        self, end: socket.socket, on_line: Callable[[Message], None], closed: asyncio.Event
    ) -> asyncio.WriteTransport:
        end.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: _Channel(on_line, closed.set), sock=end)
        return transport

    def send(self, line: bytes) -> None:
        """A row's line. Never waits: credits bound what can be unread.

        Rows that come in one turn of the event loop go down together: a system call costs as much as a row.
        """
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(line)

    def _flush(self) -> None:
        lines, self._unsent = self._unsent, []
        if self._data is not None and not self._data.is_closing():
            self._data.write(b"".join(lines))

    def tell(self, message: Message) -> None:
        """A control message; it overtakes rows."""
        if self._control is not None and not self._control.is_closing():
            self._control.write(encode(message))

    async def _watch(self) -> None:
        """Wait for the end: of either channel or of the process, whichever comes first, then of all three."""
        assert self._process is not None
        reading = asyncio.create_task(self._read_output(), name="engine output")
        ends = [asyncio.create_task(event.wait()) for event in self._closed]
        waiting = asyncio.create_task(self._process.wait())
        await asyncio.wait([*ends, waiting], return_when=asyncio.FIRST_COMPLETED)
        # A child with half its ends gone is of no use, and a stuck one may not notice: give it a moment.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), timeout=1.0)
        self.kill()
        await waiting
        await asyncio.wait(ends, timeout=1.0)  # what it still managed to say
        for task in ends:
            task.cancel()
        with contextlib.suppress(TimeoutError):  # a grandchild could hold its output open
            await asyncio.wait_for(reading, timeout=1.0)
        self._hang_up()
        self.ended.set()

    async def _read_output(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        lines = Lines()
        while chunk := await self._process.stdout.read(1 << 16):
            for line in lines.feed(chunk):
                text = line.decode(errors="replace").rstrip()
                if text:
                    self._words.append(text)
                    log.info("%s", text)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None and self._process.returncode is None:
                self._killed = True
                self._process.send_signal(signal.SIGKILL)

    def suspects(self) -> set[str]:
        """Ids of the rows that it was working on; meaningful once it has ended."""
        return self._board.suspects() if self._board is not None else set()

    def how_it_ended(self) -> str:
        """For a sentence: "was killed by SIGKILL", "exited with 1"."""
        code = self._process.returncode if self._process is not None else None
        if code is None:
            return "is gone"
        if code == OUT_OF_MEMORY:
            return "ran out of memory"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
            return f"was killed by signal {-code}"
        return f"exited with {code}"

    def ran_out_of_memory(self) -> bool:
        """Whether it said so, or was killed as the kernel does when there is none left: by nobody we know."""
        code = self._process.returncode if self._process is not None else None
        return code == OUT_OF_MEMORY or (code == -signal.SIGKILL and not self._killed)

    def last_words(self) -> str:
        return self._words[-1] if self._words else ""

    async def close(self, patience_s: float = 0.5) -> None:
        """Ask it to go, then make it."""
        if self._watching is None:
            return
        self.tell({"op": "shutdown"})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), timeout=patience_s)
        self.kill()
        await self._watching
        if self._board is not None:
            self._board.close()
            self._board = None

    def _hang_up(self) -> None:
        for transport in (self._data, self._control):
            if transport is not None:
                transport.abort()
