"""Runs Lua scripts in Redis, by their hash, and waits out a Redis that is away.

A reply can be lost after a script ran, and this room then sends it again: every script must be safe to run
twice (each says in its first lines why it is). This room may not know what the scripts do.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from pagemill.jobs.errors import RedisUnavailable
from pagemill.jobs.redaction import without_password

_FOLDER = Path(__file__).with_name("lua")
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
SOCKET_TIMEOUT_S: Final = 10.0
"""A reply that takes longer is taken for lost. Scripts last microseconds, the longest plans a second."""

# Starting, changing roles, busy with a long script, or out of memory or disk until somebody makes room.
_PASSING: Final = (
    "LOADING",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "BUSY ",
    "UNBLOCKED",
    "OOM",
    "MISCONF",
    "NOREPLICAS",
)

T = TypeVar("T")
Arg = str | int | float | bytes


@cache
def source(name: str) -> str:
    """The text of one script, with what all of them share before it.

    Lua in Redis has no modules; scripts that shared no text would each keep their own copy of the key names,
    the table of moves and the two indexes that leasing searches.
    """
    return f"{(_FOLDER / 'common.lua').read_text()}\n{(_FOLDER / f'{name}.lua').read_text()}"


@cache
def sha(name: str) -> str:
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


def connection(url: str) -> Redis:
    """A client that leaves retrying to `Scripts`: nested retries multiply, and lose the time limit."""
    try:
        client = Redis.from_url(
            url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=5.0,
            health_check_interval=30,
            **({} if url.startswith("unix:") else {"socket_keepalive": True}),
        )
        # An option that no connection knows shows only when one is made; it is not opened here.
        client.connection_pool.make_connection()
    except (ValueError, TypeError) as error:
        said = str(error).rpartition("__init__() ")[2].rstrip(".")
        raise RedisUnavailable(f"{without_password(url)} is not a Redis address: {said}.") from None
    return cast(Redis, client)


class Scripts:
    """Calls scripts and plain commands of one Redis, again and again for `patience_s` while it is away."""

    def __init__(self, redis: Redis, patience_s: float) -> None:
        self.redis = redis
        self.patience_s = patience_s

    async def call(self, name: str, key: str, *args: Arg) -> Any:
        """The script's reply, bytes decoded. Raises RedisUnavailable when patience ends."""
        return decoded(await self.patiently(lambda: self._once(name, key, args)))

    async def call_many(self, name: str, calls: Sequence[tuple[str, tuple[Arg, ...]]]) -> list[Any]:
        """One reply per (key, args), in batches that share a round trip; one cut short is sent again."""
        replies: list[Any] = []
        for start in range(0, len(calls), 256):
            batch = calls[start : start + 256]
            replies += decoded(await self.patiently(lambda batch=batch: self._batch(name, batch)))  # type: ignore[misc]
        return replies

    async def patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Awaits `attempt` until it succeeds, fails for good, or patience ends."""
        deadline = time.monotonic() + self.patience_s
        pause, cancels = _FIRST_PAUSE_S, _cancels()
        while True:
            try:
                result = await attempt()
                _heed_cancel(cancels)
                return result
            except (RedisError, OSError) as error:
                if not _passes(error):
                    raise _refused(error) from error
                if time.monotonic() + pause > deadline:
                    raise RedisUnavailable(f"Redis at {self.address} {_trouble(error)}.") from error
                if isinstance(
                    error, ReadOnlyError
                ):  # a failover: the old primary's connections lead to a replica
                    await self.redis.connection_pool.disconnect(inuse_connections=False)
            _heed_cancel(cancels)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    @property
    def address(self) -> str:
        """Where this Redis is, without a password."""
        options = self.redis.connection_pool.connection_kwargs
        return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")

    async def _once(self, name: str, key: str, args: tuple[Arg, ...]) -> Any:
        try:
            return await _awaited(self.redis.evalsha(sha(name), 1, key, *cast(Any, args)))
        except NoScriptError:  # a fresh or restarted server
            return await _awaited(self.redis.eval(source(name), 1, key, *cast(Any, args)))

    async def _batch(self, name: str, calls: Sequence[tuple[str, tuple[Arg, ...]]]) -> list[Any]:
        await _awaited(self.redis.script_load(source(name)))
        async with self.redis.pipeline(transaction=False) as pipe:
            for key, args in calls:
                pipe.evalsha(sha(name), 1, key, *cast(Any, args))
            return await pipe.execute()


def decoded(reply: Any) -> Any:
    """Bytes as text, all the way down, whether or not the client was told to decode; sequences become
    lists."""
    if isinstance(reply, bytes):
        return reply.decode("utf-8", "replace")
    if isinstance(reply, (list, tuple, set)):
        return [decoded(item) for item in reply]
    if isinstance(reply, dict):
        return {decoded(key): decoded(value) for key, value in reply.items()}
    return reply


def pairs(flat: Iterable[Any]) -> dict[str, str]:
    """The name, value, name, value… of HGETALL inside a script, as a dict."""
    items = iter(flat)
    return {str(name): str(value) for name, value in zip(items, items, strict=True)}


def _cancels() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _heed_cancel(before: int) -> None:
    """A cancel that arrives as a command has just been sent is lost in redis-py on Python 3.11, whose
    `asyncio.wait_for` then returns the result instead; whoever waits for the task's end would wait for
    ever."""
    if _cancels() > before:
        raise asyncio.CancelledError


async def _awaited(call: Any) -> Any:
    """redis-py types every command as maybe-awaitable; the asyncio client's always are."""
    return await call


def _passes(error: Exception) -> bool:
    """Does this fault mend itself? A connection, a server that is starting, or one that is changing roles."""
    if isinstance(error, (AuthenticationError, AuthorizationError)):
        return False
    if isinstance(
        error, (ConnectionError, TimeoutError, OSError, ReadOnlyError, NoScriptError, TryAgainError)
    ):
        return True
    return isinstance(error, ResponseError) and str(error).startswith(_PASSING)


def _refused(error: Exception) -> Exception:
    """A refusal that a person can mend, in a sentence; anything else is a fault of ours and stays."""
    text = str(error)
    if isinstance(error, (AuthenticationError, AuthorizationError)) or text.startswith(
        ("NOPERM", "NOAUTH", "WRONGPASS")
    ):
        return RedisUnavailable(f"Redis refuses us, check the user and password of its URL: {text}.")
    if "DB index" in text:
        return RedisUnavailable(f"This Redis has no such database ({text}): end its URL in /0.")
    return error


def _trouble(error: Exception) -> str:
    """What is wrong with a Redis that we waited for, and what mends it."""
    said = _reason(error)
    for start, remedy in _REMEDIES.items():
        if said.startswith(start):
            return f"refuses to write ({said}): {remedy}"
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return f"is not trusted ({said}): name its authority, as in rediss://host/0?ssl_ca_certs=/path/ca.pem"
    if isinstance(error, ReadOnlyError):
        return f"is a read-only replica ({said}): name the primary"
    if isinstance(error, ResponseError):
        return f"is not ready ({said}): try again in a moment"
    return f"does not answer ({said}): start it, or name another one in PAGEMILL_REDIS_URL"


_REMEDIES: Final = {
    "MISCONF": "free space on its disk",
    "OOM": "give it more memory (maxmemory); it must not evict",
    "NOREPLICAS": "start its replicas",
}


def _reason(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__
