"""TLS to a Redis with a password, signed requests to an S3 store, and no secret in what anybody reads."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from worker_place import Place, end_all, whole

from pagemill.jobs.client import Client
from pagemill.jobs.errors import RedisUnavailable, StorageError
from pagemill.jobs.storage import open_storage

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs" / "support"))

from tls import make_authority, tls_before

PASSWORD = "p%40ss-w0rd-of-redis"  # as in a URL; it is p@ss-w0rd-of-redis
SECRETS = ("p%40ss-w0rd-of-redis", "p@ss-w0rd-of-redis")


async def with_password(redis_server: Any) -> tuple[str, int]:
    """The server wants the password from now on."""
    import redis.asyncio

    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.execute_command("CONFIG", "SET", "requirepass", SECRETS[1])
    await client.aclose()
    parts = urlsplit(redis_server.url)
    return str(parts.hostname), int(parts.port or 0)


async def test_a_job_over_tls_and_signed_requests_with_no_secret_in_any_log(
    redis_server: Any, s3: Any, tmp_path: Path
) -> None:
    authority = make_authority(tmp_path / "tls")
    async with tls_before(*await with_password(redis_server), authority) as port:
        url = f"rediss://:{PASSWORD}@localhost:{port}/0?ssl_ca_certs={authority.ca}"
        place = Place(url, s3.url, tmp_path, variables=s3.variables())
        worker = place.spawn(log_format="json", log_level="debug", metrics_port=0)
        try:
            await worker.ready()
            async with Client(url, s3.url, storage_options=s3.options) as client:
                job = await client.submit(["hello"] * 20, model=place.model)
                await whole(place, client, job, 20)
            worker.send(15)
            assert await worker.ended() == 0
        finally:
            await asyncio.to_thread(end_all, place)
    said = worker.said()
    for secret in (*SECRETS, s3.secret_key):
        assert secret not in said
    lines = [json.loads(line) for line in said.splitlines()]
    about = [line for line in lines if line.get("task") == "shard:0"]
    assert {line["message"].rpartition(": ")[2] for line in about} >= {"done"}
    assert all((line["job"], line["shard"]) == (job.id, 0) for line in about)
    assert {line["worker"] for line in lines} == {lines[0]["worker"]}


async def test_a_server_whose_authority_is_not_known_is_refused(redis_server: Any, tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "tls")
    async with tls_before(*await with_password(redis_server), authority) as port:
        other = make_authority(tmp_path / "other")
        for query in ("", f"?ssl_ca_certs={other.ca}"):
            url = f"rediss://:{PASSWORD}@localhost:{port}/0{query}"
            with pytest.raises(RedisUnavailable) as caught:
                async with Client(url, str(tmp_path / "store"), patience=0.5) as client:
                    await client.list()
            assert "is not trusted" in str(caught.value)
            assert "ssl_ca_certs=" in str(caught.value)
            assert not any(secret in str(caught.value) for secret in SECRETS)


async def test_wrong_passwords_and_keys_are_refused_and_not_repeated(
    redis_server: Any, s3: Any, tmp_path: Path
) -> None:
    host, port = await with_password(redis_server)
    with pytest.raises(RedisUnavailable) as caught:
        async with Client(
            f"redis://:wrong-password@{host}:{port}/0", str(tmp_path / "store"), patience=0.5
        ) as client:
            await client.list()
    assert "wrong-password" not in str(caught.value)
    from dataclasses import replace

    refused = open_storage(s3.url, replace(s3.options, secret_key="wrong-secret"))
    with pytest.raises(StorageError) as told:
        await asyncio.to_thread(refused.check)
    assert "refused the credentials" in str(told.value)
    assert "wrong-secret" not in str(told.value)
