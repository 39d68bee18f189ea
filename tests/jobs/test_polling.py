"""The manual's ways to follow a job without Python: what jobs/README.md shows is what runs here."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fake_worker import unique, work

from pagemill.jobs.client import Client

README = (Path(__file__).parents[2] / "jobs" / "README.md").read_text()


# Where redis-cli is not installed: a reply's elements, a line each, which is how it answers a pipe.
STAND_IN = """
import sys, redis
address, *words = sys.argv[2:]
words = [word for word in words if word != "--raw"]
found = redis.Redis.from_url(address, decode_responses=True).execute_command(*words)
lines = [part for pair in found.items() for part in pair] if isinstance(found, dict) else found
print(*(["" if lines is None else lines] if not isinstance(lines, list) else lines), sep="\\n")
"""


def block(first_line: str) -> str:
    """The fenced block of the manual that starts like this."""
    found = re.search(rf"```\w+\n({re.escape(first_line)}\n.*?)```", README, re.DOTALL)
    assert found, f"jobs/README.md has no block that starts with {first_line}"
    return found[1]


def command(kind: str, job: str, redis_url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    address = urlsplit(redis_url)
    if kind == "sh":
        (folder / "bin").mkdir(exist_ok=True)
        place = folder / "bin" / "redis-cli"
        program = shutil.which("redis-cli") or shutil.which("valkey-cli")
        if program is not None and not place.exists():
            place.symlink_to(program)
        elif program is None:
            place.write_text(f"#!{sys.executable}\n{STAND_IN}")
            place.chmod(0o755)
        (folder / "wait.sh").write_text(block("# wait.sh"))
        path = f"{folder / 'bin'}:/usr/bin:/bin"
        return ["sh", str(folder / "wait.sh")], {"JOB": job, "PAGEMILL_REDIS_URL": redis_url, "PATH": path}
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if address.password or address.scheme != "redis":
        pytest.skip("the example speaks to a Redis without a password or TLS")
    (folder / "wait.js").write_text(block("// wait.js"))
    return ["node", str(folder / "wait.js"), job, redis_url], dict(os.environ)


@pytest.mark.parametrize("kind", ["sh", "js"])
async def test_a_job_is_followed_to_its_end(
    client: Client, redis_url: str, tmp_path: Path, kind: str
) -> None:
    model = unique("model")
    job = await client.submit(["a", {"prompt": 5}, "c"], model=model)
    words, env = command(kind, job.id, redis_url, tmp_path)
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "validating 0 0 0\n"
        await work(await client.state(), client.storage, model)
        rest = process.stdout.read().splitlines()
    assert process.returncode == 0
    assert rest[-1] == "completed 2 1 3"


@pytest.mark.parametrize("kind", ["sh", "js"])
def test_a_job_that_is_not_there_is_said_to_be_unknown(redis_url: str, tmp_path: Path, kind: str) -> None:
    words, env = command(kind, "job-never", redis_url, tmp_path)
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert "no such job" in done.stdout
    assert done.returncode == 3


@pytest.mark.parametrize("kind", ["sh", "js"])
def test_a_redis_that_is_not_there_is_another_end_than_an_unknown_job(tmp_path: Path, kind: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        words, env = command(kind, "job-never", f"redis://127.0.0.1:{taken.getsockname()[1]}/1", tmp_path)
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no such job" not in done.stdout
    assert done.stderr


async def test_the_public_commands_of_the_manual(client: Client, redis_url: str, tmp_path: Path) -> None:
    job = await client.submit(["a"], model=unique("model"))
    _, env = command("sh", job.id, redis_url, tmp_path)
    lines = [
        line
        for line in block("redis-cli HGETALL 'pagemill:{job-01kb7x}'").splitlines()
        if "BLOCK" not in line
    ]
    outputs = []
    for line in lines:
        script = line.replace("redis-cli", 'redis-cli -u "$PAGEMILL_REDIS_URL"').replace("job-01kb7x", job.id)
        done = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, check=True)
        outputs.append(done.stdout)
    fields = dict(zip(outputs[0].splitlines()[::2], outputs[0].splitlines()[1::2], strict=False))
    assert fields["state"] == "validating"
    assert abs(time.time() - float(fields["created_at"])) < 3600
    assert outputs[1].splitlines()[:4] == ["validating", "0", "0", "0"]
    assert job.id in outputs[2] or len(outputs[2].splitlines()) == 10
