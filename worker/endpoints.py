"""What a worker answers over HTTP, for orchestrators and for Prometheus; nothing of a job is in it.

    /livez     200 while the worker's event loop turns, else 503: whoever started the process should end it
    /readyz    200 while it takes work: model loaded, Redis there, machine sound; else 503, and why, as JSON
    /metrics   the figures (metrics.py)

On the loopback address unless told otherwise. The server has threads of its own, so that a loop that is stuck
is told from a machine that is gone. This room may not know what makes a worker ready.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from pagemill.jobs.errors import UsageError

PATHS = ("/livez", "/readyz", "/metrics")
ALIVE_WITHIN_S = 5.0  # a loop that takes longer to answer is stuck: its longest steps take milliseconds
REQUEST_TIMEOUT_S = 10.0

Readiness = Callable[[], tuple[bool, Mapping[str, Any]]]


class Endpoints:
    """Answers from `serve` until `close`. ready: whether the worker takes work, and what to say of it."""

    def __init__(self, registry: CollectorRegistry, ready: Readiness) -> None:
        self._registry, self._ready = registry, ready
        self._loop = asyncio.get_running_loop()
        self._server: ThreadingHTTPServer | None = None
        self._thread: Thread | None = None

    def serve(self, host: str, port: int) -> str:
        """Begin (port 0: any free one); returns the base URL. Raises UsageError where the port is taken."""
        answers = dict(zip(PATHS, (self._livez, self._readyz, self._metrics), strict=True))
        handler = type("Handler", (_Handler,), {"answers": answers})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise UsageError(
                f"Port {port} of {host} for metrics cannot be used: {error.strerror}; choose another."
            ) from error
        self._thread = Thread(target=self._server.serve_forever, name="endpoints", daemon=True)
        self._thread.start()
        return f"http://{host}:{self._server.server_port}"

    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def _livez(self, _accept: str) -> tuple[int, str, bytes]:
        turned = Event()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(turned.set)
        if not turned.wait(ALIVE_WITHIN_S):
            return 503, "text/plain; charset=utf-8", b"The event loop is stuck.\n"
        return 200, "text/plain; charset=utf-8", b"ok\n"

    def _readyz(self, _accept: str) -> tuple[int, str, bytes]:
        ready, facts = self._ready()
        body = json.dumps({"ready": ready, **facts}, ensure_ascii=False)
        return 200 if ready else 503, "application/json", body.encode() + b"\n"

    def _metrics(self, accept: str) -> tuple[int, str, bytes]:
        encode, kind = choose_encoder(accept)
        return 200, kind, encode(self._registry)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle is no news."""


class _Handler(BaseHTTPRequestHandler):
    answers: ClassVar[Mapping[str, Callable[[str], tuple[int, str, bytes]]]]
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "pagemill", ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        answer = self.answers.get(self.path.partition("?")[0])
        if answer is None:
            status, kind, body = (
                404,
                "text/plain; charset=utf-8",
                f"There are {', '.join(PATHS)}.\n".encode(),
            )
        else:
            status, kind, body = answer(self.headers.get("Accept", ""))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds; they are not logged."""
