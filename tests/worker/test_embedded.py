"""The private Valkey: nobody else's, kept between runs, and gone with its owner."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pagemill.jobs.errors import RedisUnavailable, UsageError
from pagemill.worker.embedded import embedded_redis


def valkeys_in(folder: Path) -> list[int]:
    """Server processes that work in this folder."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if "valkey-server" in (proc / "comm").read_text() and (proc / "cwd").readlink() == folder:
                found.append(int(proc.name))
        except OSError:
            continue
    return found


async def test_it_answers_and_keeps_everything(tmp_path: Path) -> None:
    async with embedded_redis(tmp_path) as url:
        client: Redis = Redis.from_url(url)
        assert (await client.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"
        assert (await client.config_get("appendonly"))["appendonly"] == "yes"
        await client.set("a", "1")
        await client.aclose()
    assert valkeys_in(tmp_path) == []
    async with embedded_redis(tmp_path) as url:
        client = Redis.from_url(url)
        assert await client.get("a") == b"1"
        await client.aclose()


async def test_nobody_else_can_reach_it(tmp_path: Path) -> None:
    async with embedded_redis() as url:
        socket = Path(url.removeprefix("unix://"))
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        client: Redis = Redis.from_url(url)
        assert (await client.config_get("port"))["port"] == "0"
        await client.aclose()
    assert not socket.parent.exists()


async def test_a_folder_that_another_run_holds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill.worker.embedded.LOCK_PATIENCE_S", 0.2)
    async with embedded_redis(tmp_path):
        with pytest.raises(UsageError, match="Another run is using"):
            async with embedded_redis(tmp_path):
                pass


async def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="cannot be written"):
        async with embedded_redis(tmp_path / "file" / "data"):
            pass


async def test_a_server_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_bytes(b"")  # where the server wants a folder
    with pytest.raises(RedisUnavailable, match="embedded server"):
        async with embedded_redis(tmp_path, patience_s=3.0):
            pass


OWNER = """
import asyncio, sys
from pathlib import Path
from pagemill.worker.embedded import embedded_redis
async def main():
    async with embedded_redis(Path(sys.argv[1])) as url:
        print(url, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_killed_owner_takes_its_server_along_and_leaves_its_data(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        url = (await asyncio.to_thread(owner.stdout.readline)).strip()
        client: Redis = Redis.from_url(url)
        await client.set("a", "1")
        await client.aclose()
        assert valkeys_in(tmp_path)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    async with embedded_redis(tmp_path) as again:  # waits for the old server to be gone
        assert again != url
        assert len(valkeys_in(tmp_path)) == 1
        client = Redis.from_url(again)
        assert await client.get("a") == b"1"
        await client.aclose()
