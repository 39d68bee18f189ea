"""What a worker answers over HTTP: alive, ready, and its figures; on loopback unless told otherwise."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import socket
import urllib.error
import urllib.request
from threading import Thread
from typing import Any

import pytest
from worker_place import Place, eventually

from pagemill.jobs.errors import UsageError
from pagemill.worker import endpoints as module
from pagemill.worker.endpoints import Endpoints
from pagemill.worker.metrics import Figures
from pagemill.worker.settings import WorkerSettings


def got(url: str) -> tuple[int, str, str]:
    """Status, kind and body."""
    try:
        with urllib.request.urlopen(url, timeout=15) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


async def fetched(url: str) -> tuple[int, str, str]:
    return await asyncio.to_thread(got, url)


def ready() -> tuple[bool, dict[str, Any]]:
    return False, {"state": "starting"}


async def test_nobody_else_reaches_it_unless_somebody_says_so() -> None:
    host = WorkerSettings(store="store").metrics_host
    assert ipaddress.ip_address(host).is_loopback
    served = Endpoints(Figures().registry, ready)
    url = served.serve(host, 0)
    port = int(url.rpartition(":")[2])
    assert (await fetched(f"{url}/livez"))[0] == 200
    with pytest.raises(OSError):  # another address of this machine, as every other one
        socket.create_connection(("127.0.0.2", port), timeout=5)
    served.close()


async def test_it_answers_until_it_is_closed() -> None:
    figures = Figures()
    figures.row("completed", 7, 5, 0)
    served = Endpoints(figures.registry, ready)
    url = served.serve("127.0.0.1", 0)
    status, kind, text = await fetched(f"{url}/metrics")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert 'pagemill_tokens_total{kind="prompt"} 7.0' in text
    assert (await fetched(f"{url}/livez"))[0] == 200
    status, kind, text = await fetched(f"{url}/readyz?verbose")
    assert (status, kind, json.loads(text)) == (
        503,
        "application/json",
        {"ready": False, "state": "starting"},
    )
    assert (await fetched(f"{url}/metrics/../secret"))[0] == 404
    served.close()
    with pytest.raises(OSError):
        await fetched(f"{url}/livez")


async def test_a_stuck_loop_is_told_from_a_live_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALIVE_WITHIN_S", 0.1)
    served = Endpoints(Figures().registry, ready)
    url = served.serve("127.0.0.1", 0)
    answers: list[tuple[int, str, str]] = []
    asking = Thread(target=lambda: answers.append(got(f"{url}/livez")))
    asking.start()
    asking.join()  # in the loop's own thread, so that it does not turn until the answer is there
    assert answers == [(503, "text/plain; charset=utf-8", "The event loop is stuck.\n")]
    assert (await fetched(f"{url}/livez"))[0] == 200
    served.close()


async def test_a_client_that_says_nothing_holds_up_nobody() -> None:
    served = Endpoints(Figures().registry, ready)
    url = served.serve("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as silent:
        silent.sendall(b"GET /met")
        assert (await fetched(f"{url}/livez"))[0] == 200
    served.close()


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"Port {port} of 127\.0\.0\.1"):
            Endpoints(Figures().registry, ready).serve("127.0.0.1", port)


async def test_a_worker_is_ready_when_its_model_is_loaded_and_redis_is_there(
    alone: Place, redis_server: Any
) -> None:
    worker = alone.spawn(metrics_port=0, sim_load_s=8.0, log_format="json")
    await eventually(lambda: "metrics on" in worker.said())
    (url,) = re.findall(r"metrics on (http://127\.0\.0\.1:\d+)/metrics", worker.said())
    status, _, text = await fetched(f"{url}/readyz")
    assert (status, json.loads(text)["state"]) == (503, "starting")
    assert (await fetched(f"{url}/livez"))[0] == 200
    await worker.ready()
    await until(url, 200)
    facts = json.loads((await fetched(f"{url}/readyz"))[2])
    assert (facts["ready"], facts["loaded"], facts["redis"]) == (True, alone.model, "ok")
    redis_server.kill()
    await until(url, 503)
    assert json.loads((await fetched(f"{url}/readyz"))[2])["redis"] == "away"
    assert (await fetched(f"{url}/livez"))[0] == 200  # ending it would not bring Redis back
    redis_server.start()
    await until(url, 200)


async def until(url: str, status: int) -> None:
    for _ in range(600):
        if (await fetched(f"{url}/readyz"))[0] == status:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"/readyz never answered {status}")
