"""The Redis that misbehaves on order does what it is told, and otherwise only passes on."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from faults.redis_proxy import FaultyRedis
from redis.backoff import NoBackoff
from redis.retry import Retry


@pytest.fixture
def faulty(redis_url: str) -> Iterator[FaultyRedis]:
    port = urlsplit(redis_url).port
    assert port is not None
    with FaultyRedis(port) as proxy:
        yield proxy


@pytest.fixture
def client(faulty: FaultyRedis) -> Iterator[Any]:
    with redis.Redis.from_url(faulty.url, retry=Retry(NoBackoff(), 0), socket_timeout=0.5) as opened:
        yield opened


def test_what_is_asked_and_answered_passes(client: Any) -> None:
    key = f"test-{uuid.uuid4().hex}"
    value = b"x" * 300_000
    assert client.set(key, value, ex=60)
    assert client.get(key) == value


def test_a_reply_is_lost_and_the_script_has_run(faulty: FaultyRedis, client: Any) -> None:
    key = f"test-{uuid.uuid4().hex}"
    script = client.script_load("return redis.call('INCR', KEYS[1])")
    faulty.lose_replies(1)
    assert client.ping(), "other commands are left alone"
    with pytest.raises(redis.ConnectionError):
        client.evalsha(script, 1, key)
    assert client.get(key) == b"1"
    assert client.evalsha(script, 1, key) == 2
    assert faulty.lost == 1
    client.delete(key)


def test_connections_are_cut_and_new_ones_work(faulty: FaultyRedis, client: Any) -> None:
    # A pool looks at a connection before it gives it away, and makes another of one that was cut meanwhile.
    with client.client() as one:
        assert one.ping()
        faulty.cut()
        deadline = time.monotonic() + 30
        with pytest.raises(redis.ConnectionError):
            while time.monotonic() < deadline:
                one.ping()
        assert one.ping()
    assert client.ping()


def test_a_deaf_one_says_nothing_until_it_hears_again(faulty: FaultyRedis, client: Any) -> None:
    assert client.ping()
    faulty.deaf(True)
    with pytest.raises(redis.TimeoutError):
        client.ping()
    faulty.calm()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            assert client.ping()
            return
        except redis.RedisError:
            pass
    pytest.fail("it stayed deaf")
