"""The examples of jobs/README.md, run as they stand: with a real Redis, a store, and somebody who serves the
model."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import re
import threading
import types
from collections.abc import Iterator
from inspect import CO_COROUTINE
from pathlib import Path
from typing import Any

import pytest
from fake_worker import unique, work

from pagemill.jobs.client import Client

README = (Path(__file__).parents[2] / "jobs" / "README.md").read_text()
SECTION = README[README.index("## From Python") : README.index("## Commands")]
EXAMPLES = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


@contextlib.contextmanager
def served(redis_url: str, store: str, model: str) -> Iterator[None]:
    """Somebody who does the model's tasks until the block is left."""
    over = threading.Event()

    async def serve() -> None:
        async with Client(redis_url, store) as client:
            while not over.is_set():
                await work(await client.state(), client.storage, model)
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def run(example: str) -> dict[str, Any]:
    """The names that the example leaves behind; `await` may stand at its top, as in a notebook."""
    names: dict[str, Any] = {"__name__": "example"}
    code = compile(example, "jobs/README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & CO_COROUTINE:
        asyncio.run(types.FunctionType(code, names)())
    else:
        exec(code, names)
    return names


@pytest.fixture
def example(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[str]:
    model, store = unique("model"), str(tmp_path / "store")
    monkeypatch.setenv("PAGEMILL_REDIS_URL", redis_url)
    monkeypatch.setenv("PAGEMILL_STORE", store)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    text = next(text for text in EXAMPLES if request.param in text)
    text = text.replace('"llama"', repr(model)).replace("atlas-2026-05", f"atlas-{model}")
    with served(redis_url, store, model):
        yield text.replace("documents of 2026-05-01", f"documents of {model}")


def test_the_manual_has_these_examples() -> None:
    assert len(EXAMPLES) == 6


@pytest.mark.parametrize("example", ["Name a river"], indirect=True)
def test_a_script(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(example)
    assert capsys.readouterr().out == "row-0 answer to Name a river.\nrow-1 answer to Name a lake.\n"


@pytest.mark.parametrize("example", ["prompts.jsonl"], indirect=True)
def test_a_coroutine_or_a_cell(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(example)
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["completed 2 0 2", "2"]


@pytest.mark.parametrize("example", ["pandas"], indirect=True)
def test_a_frame(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    answers = run(example)["answers"]
    assert list(answers["custom_id"]) == ["s7", "s8"]
    assert "Translate to French: Dawn" in answers["text"][0]
    assert "`title` is null" in answers["error_message"][1]
    assert "s8" in capsys.readouterr().out


@pytest.mark.parametrize("example", ["async def documents"], indirect=True)
def test_a_stream(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(example)
    run(example)  # the same job: it is found, not made
    said = capsys.readouterr().out
    assert said.count("What is document 2 about?") == 2
    assert re.findall(r"^\d+", said, re.MULTILINE) == ["3", "3"]


@pytest.mark.parametrize("example", ["flask"], indirect=True)
def test_a_web_application(example: str) -> None:
    names = run(example)
    web = names["app"].test_client()
    headers = {"Idempotency-Key": unique("key")}
    made = [web.post("/jobs", json={"prompts": ["a", "b"]}, headers=headers).json for _ in range(2)]
    assert made[0] == made[1]
    names["client"].wait(made[0]["job"])
    assert web.get(f"/jobs/{made[0]['job']}").json == {"state": "completed", "done": 2, "of": 2}
    missing = web.get("/jobs/never")
    assert missing.status_code == 404
    assert "no job never" in missing.json["error"]
    names["client"].close()


@pytest.mark.parametrize("example", ["django"], indirect=True)
def test_views_of_django(example: str) -> None:
    import django
    from django.conf import settings
    from django.test import Client as Browser
    from django.urls import path

    names = run(example)
    urls = types.ModuleType("urls")
    urls.__dict__["urlpatterns"] = [path("jobs", names["submit"]), path("jobs/<job>", names["progress"])]
    settings.configure(
        ROOT_URLCONF=urls, ALLOWED_HOSTS=["testserver"], SECRET_KEY="for a test", MIDDLEWARE=[]
    )
    django.setup(set_prefix=False)
    web, headers = Browser(), {"Idempotency-Key": unique("key")}
    sent = {"prompts": ["a", "b"]}
    made = [web.post("/jobs", sent, "application/json", headers=headers).json() for _ in range(2)]
    assert made[0] == made[1]
    names["client"].wait(made[0]["job"])
    assert web.get(f"/jobs/{made[0]['job']}").json() == {"state": "completed", "done": 2, "of": 2}
    missing = web.get("/jobs/never")
    assert (missing.status_code, "no job never" in missing.json()["error"]) == (404, True)
    assert web.get("/jobs").status_code == 405
    names["client"].close()


def test_results_and_submissions_are_documented() -> None:
    """The manual is the docstrings: each public method has one, and `submit` names each of its arguments."""
    public = [
        member for name, member in vars(Client).items() if not name.startswith("_") and callable(member)
    ]
    assert all(inspect.getdoc(member) for member in public)
    text = inspect.getdoc(Client.submit) or ""
    missing = [
        name for name in inspect.signature(Client.submit).parameters if name != "self" and name not in text
    ]
    assert not missing
