"""The servers that tests run against: they answer, and they are gone afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

servers = sys.modules["pagemill_infra_servers"]  # loaded by tests/conftest.py
SCRIPT = Path(servers.__file__)
SHOW = (
    "import os; print(*(os.environ[f'PAGEMILL_TEST_{n}'] for n in ('REDIS_URL', 'S3_ENDPOINT')), flush=True)"
)


def environment(**given: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_TEST_")}
    return own | given


def answers(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((str(parts.hostname), int(parts.port or 0))) == 0


def gone(urls: list[str]) -> bool:
    deadline = time.monotonic() + 10
    while any(answers(url) for url in urls):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def start(code: str, **given: str) -> subprocess.Popen[str]:
    words = [sys.executable, str(SCRIPT), "--", sys.executable, "-c", code]
    return subprocess.Popen(words, env=environment(**given), stdout=subprocess.PIPE, text=True)


@pytest.fixture
def short_folder() -> Iterator[str]:
    """For what a killed process leaves; pytest's own are too long for the sockets in them."""
    with tempfile.TemporaryDirectory(prefix="pm-", dir="/tmp") as folder:
        yield folder


def test_a_command_finds_both_servers_and_its_exit_code_comes_through() -> None:
    code = (
        f"{SHOW}; import redis; redis.Redis.from_url(os.environ['PAGEMILL_TEST_REDIS_URL']).ping(); exit(7)"
    )
    with start(code) as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 7
    assert gone(said.split())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_servers_end_with_whoever_started_them(how: signal.Signals, short_folder: str) -> None:
    if how == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux tells a process that its parent died")
    with start(f"{SHOW}; import time; time.sleep(60)", TMPDIR=short_folder) as process:
        assert process.stdout is not None
        urls = process.stdout.readline().split()
        assert all(answers(url) for url in urls)
        process.send_signal(how)
        code = process.wait(timeout=20)
    assert code == (128 + signal.SIGTERM if how == signal.SIGTERM else -signal.SIGKILL)
    assert gone(urls)


def test_addresses_that_are_given_are_taken_as_they_are() -> None:
    given = {
        "PAGEMILL_TEST_REDIS_URL": "redis://elsewhere:1/0",
        "PAGEMILL_TEST_S3_URL": "s3://theirs/prefix",
        "PAGEMILL_S3_ENDPOINT": "http://elsewhere:2",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
    }
    with start(f"{SHOW}; print(os.environ['PAGEMILL_TEST_S3_SECRET_KEY'])", **given) as process:
        said, _ = process.communicate(timeout=60)
    assert said.split() == ["redis://elsewhere:1/0", "http://elsewhere:2", "hunter2"]
    address = servers.S3Address.given(given)
    assert address.url == "s3://theirs/prefix"
    assert "hunter2" not in repr(address)


def test_a_command_that_cannot_be_run_is_said_in_a_sentence() -> None:
    words = [sys.executable, str(SCRIPT), "--", "/no/such/command"]
    given = {"PAGEMILL_TEST_REDIS_URL": "redis://x", "PAGEMILL_TEST_S3_URL": "s3://x"}
    ended = subprocess.run(
        words, env=environment(**given), capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("pagemill: cannot run /no/such/command")
    assert "Traceback" not in ended.stderr


def test_without_an_installed_redis_the_bundled_valkey_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert shutil.which("redis-server") is None
    server = servers.RedisServer(tmp_path)
    server.start()
    try:
        assert "valkey" in server.process.args[0]
        assert answers(server.url)
    finally:
        server.kill()


def test_a_killed_redis_comes_back_with_its_data(redis_server: object) -> None:
    import redis

    server: Any = redis_server
    with redis.Redis.from_url(server.url) as client:
        client.set("a", "1")
    server.kill()
    assert gone([server.url])
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.get("a") == b"1"
