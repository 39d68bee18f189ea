"""What tests of several rooms need: a real Redis, a real S3 server, and stores over both kinds of storage.

Servers start when the first test asks and serve the whole session, or are the ones that
PAGEMILL_TEST_REDIS_URL and PAGEMILL_TEST_S3_URL name (infra/servers.py). They are shared and never emptied:
a test uses ids and keys of its own.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# Without a card Triton kernels are interpreted, which is settled for the whole process by the first import of
# Triton, and some library may do that before a test of kernels is collected.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

if TYPE_CHECKING:
    from pagemill.jobs.storage import Storage, StorageOptions

# How long one example takes says more about what else the machine does than about the code.
# CI judges a change, not its luck: it draws the same examples each time. Everywhere else they are new ones.
settings.register_profile(
    "pagemill",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("pagemill")


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where processes share the tests, those of whole workers stay in one, and those of commands too: they
    watch clocks, and two of a kind beside each other would be two loads on the machine at once."""
    for item in items:
        room = item.path.relative_to(Path(__file__).parent).parts[0]
        if room in ("worker", "infra"):
            item.add_marker(pytest.mark.xdist_group(room))


# infra/faults/: the proxies that tests share with the chaos run.
sys.path.insert(0, str(Path(__file__).parent.parent / "infra"))


def _load_servers() -> ModuleType:
    """infra/ is no package: what tests share with the command line is loaded from its file."""
    name = "pagemill_infra_servers"
    if name not in sys.modules:
        path = Path(__file__).parent.parent / "infra" / "servers.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


servers = _load_servers()


@dataclass(frozen=True)
class S3:
    """A prefix of its own on a real S3 server. url: s3://bucket/prefix, for `open_storage(url, options)`."""

    url: str
    bucket: str
    prefix: str
    endpoint: str | None
    region: str | None
    access_key: str | None = field(repr=False)
    secret_key: str | None = field(repr=False)
    options: StorageOptions

    def variables(self) -> dict[str, str]:
        """The same as environment variables, for a process of its own."""
        found = {
            "PAGEMILL_S3_ENDPOINT": self.endpoint,
            "PAGEMILL_S3_REGION": self.region,
            "PAGEMILL_S3_ACCESS_KEY": self.access_key,
            "PAGEMILL_S3_SECRET_KEY": self.secret_key,
        }
        return {name: value for name, value in found.items() if value}


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with servers.redis_address() as url:
        # Each of the processes that share the tests has a database of its own: workers of the one sweep
        # whatever jobs they find. None has the first, so that whoever forgets the number is found out.
        number = 1 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        yield f"{url.removesuffix('/0')}/{number}" if url.endswith("/0") else url


@pytest.fixture(scope="session")
def s3_server() -> Iterator[object]:
    """The address alone; most tests want `s3`."""
    with servers.s3_address() as address:
        yield address


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[object]:
    """A Redis of this test alone, to be killed and started again (`kill`, `start`, `url`)."""
    server = servers.RedisServer(tmp_path, durable=True)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def s3(s3_server: servers.S3Address) -> S3:  # type: ignore[name-defined]
    from pagemill.jobs.storage import StorageOptions

    address = s3_server
    bucket, _, above = address.url.removeprefix("s3://").strip("/").partition("/")
    prefix = "/".join(filter(None, (above, f"test-{uuid.uuid4().hex}")))
    options = StorageOptions(
        endpoint=address.endpoint,
        region=address.region,
        access_key=address.access_key,
        secret_key=address.secret_key,
    )
    return S3(
        f"s3://{bucket}/{prefix}",
        bucket,
        prefix,
        address.endpoint,
        address.region,
        address.access_key,
        address.secret_key,
        options,
    )


@pytest.fixture
def local_storage(tmp_path: Path) -> Storage:
    from pagemill.jobs.storage import open_storage

    return open_storage(tmp_path / "store")


@pytest.fixture
def s3_storage(s3: S3) -> Storage:
    from pagemill.jobs.storage import open_storage

    return open_storage(s3.url, s3.options)


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest) -> Storage:
    """The same test over both kinds of store."""
    found: Storage = request.getfixturevalue(f"{request.param}_storage")
    return found


@pytest.fixture
def rows_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted matrix products a row at a time. A matrix unit sums each row in one order, wherever it
    stands in a tile; the library that numpy calls does not."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if os.environ.get("TRITON_INTERPRET") != "1":
        return

    def dot(self: object, a: Any, b: Any, d: Any, *_: object) -> Any:
        wide, right = d.data.dtype, b.data.astype(d.data.dtype)
        rows = [row[None].astype(wide) @ right for row in a.data]
        return interpreter.TensorHandle(np.concatenate(rows) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
