"""A certificate authority of the test's own, and TLS in front of any server of this machine."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Authority:
    """ca: whom to trust.  certificate, key: of a server called localhost, or 127.0.0.1."""

    ca: Path
    certificate: Path
    key: Path


def make_authority(folder: Path) -> Authority:
    """Skips the test where there is no openssl."""
    tool = shutil.which("openssl")
    if tool is None:
        pytest.skip("no openssl here")
    folder.mkdir(parents=True, exist_ok=True)

    def openssl(*words: str) -> None:
        subprocess.run([tool, *words], cwd=folder, check=True, capture_output=True, timeout=60)

    new = ("req", "-newkey", "rsa:2048", "-nodes")
    openssl(*new, "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=Test authority")
    openssl(*new, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", "server.pem", "-days", "2", "-extfile", "names")  # fmt: skip
    return Authority(folder / "ca.pem", folder / "server.pem", folder / "server.key")


@asynccontextmanager
async def tls_before(host: str, port: int, authority: Authority) -> AsyncIterator[int]:
    """Speaks TLS on the port that it yields, and hands on what it hears to host and port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.certificate, authority.key)
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while chunk := await reader.read(1 << 16):
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(host, port)
        for pair in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(pump(*pair))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
