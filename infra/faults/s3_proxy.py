"""An S3 server that misbehaves on order: it stands before a real one, and forwards, drops, delays or lies.

    with FaultyS3(endpoint) as faulty:
        faulty.rule("PUT", "plan.json", drop_reply, times=1)
        …                                   # the write arrives, the reply does not

Signatures stay valid because requests are passed on as they came, Host included. This room may not know
what the objects are for, nor when which fault is due.
"""

from __future__ import annotations

import http.client
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Exchange:
    """One request, and what can be done about it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    forward: Callable[[], tuple[int, list[tuple[str, str]], bytes]] = field(repr=False)
    reply: Callable[..., None] = field(repr=False)
    hang_up: Callable[[], None] = field(repr=False)


Fault = Callable[[Exchange], None]


def _pass_on(exchange: Exchange) -> None:
    exchange.reply(*exchange.forward())


def drop_reply(exchange: Exchange) -> None:
    """The server does it, and nobody hears of it."""
    exchange.forward()
    exchange.hang_up()


def drop_request(exchange: Exchange) -> None:
    exchange.hang_up()


def answer(status: int, code: str = "", **more: str) -> Fault:
    """An answer in the server's name, without asking it."""
    inner = "".join(f"<{name}>{value}</{name}>" for name, value in {"Code": code, **more}.items())
    body = f'<?xml version="1.0"?><Error>{inner}</Error>'.encode()

    def fault(exchange: Exchange) -> None:
        exchange.reply(status, [("Content-Type", "application/xml")], body)

    return fault


def cut_body(at: int) -> Fault:
    """The reply breaks off after so many bytes of its body."""

    def fault(exchange: Exchange) -> None:
        status, headers, body = exchange.forward()
        exchange.reply(status, headers, body[:at], length=len(body))
        exchange.hang_up()

    return fault


def late(seconds: float) -> Fault:
    """All is well, but slowly."""

    def fault(exchange: Exchange) -> None:
        time.sleep(seconds)
        exchange.reply(*exchange.forward())

    return fault


def stuck(seconds: float) -> Fault:
    """Nothing is done and nothing is said for so long, then the connection breaks."""

    def fault(exchange: Exchange) -> None:
        time.sleep(seconds)
        exchange.hang_up()

    return fault


def damage_reply(at: float) -> Fault:
    """One byte of the reply's body is another; at: how far into the body, from 0 to 1."""

    def fault(exchange: Exchange) -> None:
        status, headers, body = exchange.forward()
        exchange.reply(status, headers, _damaged(body, at))

    return fault


def damage_request(at: float) -> Fault:
    """One byte of what is sent is another by the time it arrives."""

    def fault(exchange: Exchange) -> None:
        exchange.body = _damaged(exchange.body, at)
        exchange.reply(*exchange.forward())

    return fault


def _damaged(body: bytes, at: float) -> bytes:
    if not body:
        return body
    place = min(int(at * len(body)), len(body) - 1)
    return body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]


@dataclass
class _Rule:
    method: str
    part: str
    fault: Fault
    left: int


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients of ours are killed in the middle of a request; that is no news."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class FaultyS3:
    """weather: asked for the fault of each request that no rule is for; None: it goes well.

    remember: keep every exchange in `seen`, bodies included; for tests, not for long runs.
    """

    def __init__(
        self,
        upstream: str,
        weather: Callable[[Exchange], Fault | None] | None = None,
        *,
        remember: bool = True,
    ) -> None:
        self._weather = weather
        self._remember = remember
        self._upstream = urlsplit(upstream).netloc
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self.seen: list[Exchange] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy._handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FaultyS3:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def rule(self, method: str, part: str, fault: Fault, *, times: int = 1_000_000) -> None:
        """The next requests of this method, with this text in path and query, go wrong in this way."""
        with self._lock:
            self._rules.append(_Rule(method, part, fault, times))

    def requests(self, method: str, part: str = "") -> list[Exchange]:
        return [e for e in self.seen if e.method == method and part in e.path]

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        exchange = Exchange(
            handler.command,
            handler.path,
            dict(handler.headers.items()),
            body,
            lambda: self._forward(exchange),
            lambda *a, **k: _reply(handler, *a, **k),
            lambda: _hang_up(handler),
        )
        with self._lock:
            if self._remember:
                self.seen.append(exchange)
            rule = next((r for r in self._rules if self._applies(r, exchange)), None)
            if rule is not None:
                rule.left -= 1
        fault = rule.fault if rule else self._weather(exchange) if self._weather else None
        try:
            (fault or _pass_on)(exchange)
        except http.client.HTTPException:  # the server itself is away
            exchange.hang_up()

    @staticmethod
    def _applies(rule: _Rule, exchange: Exchange) -> bool:
        return rule.left > 0 and rule.method == exchange.method and rule.part in exchange.path

    def _forward(self, exchange: Exchange) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self._upstream, timeout=30)
        try:
            connection.putrequest(exchange.method, exchange.path, skip_host=True, skip_accept_encoding=True)
            for name, value in exchange.headers.items():
                if name.lower() not in ("expect", "connection"):
                    connection.putheader(name, value)
            connection.endheaders(exchange.body)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()


def _reply(
    handler: BaseHTTPRequestHandler,
    status: int,
    headers: list[tuple[str, str]],
    body: bytes,
    length: int | None = None,
) -> None:
    handler.send_response_only(status)
    given = {name.lower() for name, _ in headers}
    for name, value in headers:
        if name.lower() not in ("content-length", "transfer-encoding", "connection") or (
            name.lower() == "content-length" and handler.command == "HEAD"
        ):
            handler.send_header(name, value)
    if handler.command != "HEAD" or "content-length" not in given:
        handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def _hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)
