"""A Redis that misbehaves on order: it stands before a real one, and cuts, delays or swallows what passes.

    with FaultyRedis(port) as faulty:
        faulty.lose_replies(1)      # the next script runs, and nobody hears of it
        faulty.cut()                # every connection breaks

It knows bytes and that a script is called by EVALSHA, and nothing else of the protocol.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

PIECE = 1 << 16


@dataclass(eq=False)
class _Pair:
    """A client's connection and the one that was opened to the server for it."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    called: bool = field(default=False)  # the last thing that the client sent was a script

    def close(self) -> None:
        for writer in (self.client, self.server):
            writer.transport.abort()


class FaultyRedis:
    """Its own thread and event loop. Every method may be called from any thread."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream = upstream_port
        self._pairs: set[_Pair] = set()
        self._losing = 0
        self._delay_s = 0.0
        self._deaf = False
        self._hearing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self.port = 0
        self.lost = 0
        """Replies of scripts that were swallowed."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> FaultyRedis:
        self._thread = threading.Thread(target=self._serve, daemon=True, name="redis proxy")
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # -- faults ---------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Break every connection now."""
        self._loop.call_soon_threadsafe(self._close_all)

    def lose_replies(self, count: int) -> None:
        """The next so many scripts run, and their callers' connections break instead of an answer."""
        self._losing = count

    def delay(self, seconds: float) -> None:
        """Every piece takes so much longer from now on; 0 ends it."""
        self._delay_s = seconds

    def deaf(self, yes: bool) -> None:
        """Connections are taken and stay open, and nothing passes."""
        self._deaf = yes
        if yes:
            self._loop.call_soon_threadsafe(self._hearing.clear)
            return
        self.cut()  # what was swallowed never arrives: let the callers try again
        self._loop.call_soon_threadsafe(self._hearing.set)

    def calm(self) -> None:
        self._losing, self._delay_s = 0, 0.0
        if self._deaf:
            self.deaf(False)

    # -- passing on -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._hearing.set()
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        server.close()
        self._close_all()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def _close_all(self) -> None:
        for pair in list(self._pairs):
            pair.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair(writer, to_server)
        self._pairs.add(pair)
        ways = [
            asyncio.ensure_future(self._pump(reader, to_server, lambda data: self._asked(pair, data))),
            asyncio.ensure_future(self._pump(from_server, writer, lambda _: self._answered(pair))),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            pair.close()
            self._pairs.discard(pair)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passes: Callable[[bytes], Awaitable[bool]],
    ) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(PIECE):
                if not await passes(data):
                    return
                writer.write(data)
                await writer.drain()

    async def _asked(self, pair: _Pair, data: bytes) -> bool:
        pair.called = b"EVALSHA" in data
        return await self._weather()

    async def _answered(self, pair: _Pair) -> bool:
        if pair.called and self._losing > 0:
            self._losing -= 1
            self.lost += 1
            return False
        return await self._weather()

    async def _weather(self) -> bool:
        await self._hearing.wait()
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        return True
