"""Every command in every README is run, or its need for an engine, a cluster or a GPU is stated here.

Commands of `pagemill` are read by the program's own parser; the main README's tour is run from submit to
delete with a worker; redis-cli's go to a real Redis; scripts must be there. A command of a kind that is not
known here fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from pagemill.jobs import (  # noqa: F401 (they add commands)
    commands_ended,
    commands_looking,
    commands_results,
    commands_validate,
)
from pagemill.jobs.commands import app, join_commands

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("*/*.md"),
        *ROOT.glob("*/bench/*.md"),
        ROOT / ".github" / "CONTRIBUTING.md",
    ]
    if not {".venv", "out", "models"} & set(path.relative_to(ROOT).parts)
)
# Not run here, and why.
NEEDS = {
    "docker": "a Docker engine",
    "kubectl": "a cluster",
    "aws": "Amazon's own client",
    "curl": "a running worker: tests/worker/test_endpoints.py asks the same paths",
    "kill": "running workers: tests/worker/test_survival.py sends the same signals",
}
SHELL = {"export", "cd", "wait", ".", "exit"}


@dataclass(frozen=True)
class Command:
    """One command of a document, without comments, pipes, redirections and variables before it."""

    document: Path
    words: list[str]

    @property
    def text(self) -> str:
        return " ".join(self.words)


def simple_commands(line: str) -> Iterator[list[str]]:
    """The commands of a line that are looked at: the first of a pipe, each between semicolons."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    words: list[str] = []
    taken = True
    for word in [*lexer, ";"]:
        if word == ";":
            while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0], re.DOTALL):
                words = words[1:]
            if words:
                yield words
            words, taken = [], True
        elif set(word) <= set("&|<>"):
            taken = False
        elif taken:
            words.append(word)


def blocks(document: Path) -> list[str]:
    """Blocks of commands; one that begins with a file's name is a program, which has a test of its own."""
    found = re.findall(r"^```sh\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in found if not re.match(r"# [a-z_]+\.sh\n", block)]


def commands() -> list[Command]:
    return [
        Command(document, words)
        for document in DOCUMENTS
        for block in blocks(document)
        for line in re.sub(r"\\\n\s*", " ", block).splitlines()
        for words in simple_commands(line)
    ]


COMMANDS = commands()


def of(*names: str) -> list[Command]:
    return [command for command in COMMANDS if command.words[0] in names]


def shown(command: Command) -> str:
    return f"{command.document.relative_to(ROOT)}: {command.text[:70]}"


def test_every_command_is_of_a_kind_that_is_looked_at() -> None:
    known = {"pagemill", "redis-cli", "python", "python3", "bash", *NEEDS, *SHELL}
    for command in COMMANDS:
        name = command.words[0]
        assert name in known or name.startswith(("infra/", ".venv/bin/")), shown(command)
    assert len(of("pagemill")) > 25
    assert len(of("redis-cli")) > 10


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_is_something_a_shell_can_read(document: Path) -> None:
    for block in blocks(document):
        ended = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert ended.returncode == 0, f"{ended.stderr}\n{block}"


@pytest.mark.parametrize("command", of("pagemill"), ids=shown)
def test_the_program_understands_its_own(command: Command) -> None:
    join_commands(app)
    program = typer.main.get_command(app)
    name, *words = command.words[1:]
    with program.commands[name].make_context(name, words):  # type: ignore[attr-defined]
        pass


@pytest.mark.parametrize("command", of("redis-cli"), ids=shown)
def test_redis_understands_what_it_is_asked(command: Command, redis_url: str) -> None:
    import redis

    words = [word.replace("$J", "pagemill:{job-x}") for word in command.words[1:]]
    if "-u" in words:
        at = words.index("-u")
        del words[at : at + 2]
    if words[0] == "--bigkeys":
        pytest.skip("an option of redis-cli's own")
    words = ["1" if word == "0" and words[i - 1] == "BLOCK" else word for i, word in enumerate(words)]
    if words[:2] == ["CONFIG", "SET"]:
        words[1:] = ["GET", words[2]]  # the Redis is shared
    with redis.Redis.from_url(redis_url) as client:
        client.execute_command(*words)  # raises for what Redis does not know


@pytest.mark.parametrize(
    "command",
    [c for c in COMMANDS if c.words[0].startswith(("infra/", ".venv/", "python", "bash"))],
    ids=shown,
)
def test_scripts_and_modules_are_there(command: Command) -> None:
    words = command.words
    if words[0].startswith("infra/"):
        assert os.access(ROOT / words[0], os.X_OK), words[0]
    for before, word in pairwise(words):
        if word.startswith(("infra/", "tests/")) and before not in ("--json", "--plot"):
            assert (ROOT / word.partition("::")[0]).exists(), word
    if "-m" in words and words[words.index("-m") + 1].startswith("pagemill."):
        module = words[words.index("-m") + 1].removeprefix("pagemill.").replace(".", "/")
        assert (ROOT / f"{module}.py").exists() or (ROOT / module / "__main__.py").exists()


@pytest.mark.parametrize("command", of("docker", "kubectl"), ids=shown)
def test_what_needs_an_engine_or_a_cluster_names_files_that_are_there(command: Command) -> None:
    words = command.words
    for flag in ("-f", "-k"):
        if flag in words and words[words.index(flag) + 1].startswith("infra/"):
            assert (ROOT / words[words.index(flag) + 1]).exists()
    if words[:2] == ["docker", "compose"]:
        import yaml

        services = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text())["services"]
        verb = next(i for i, word in enumerate(words) if word in ("up", "down", "run", "restart"))
        if words[verb] in ("run", "restart"):
            service = next(word for word in words[verb + 1 :] if not word.startswith("-"))
            assert service in services


TOUR = (
    "submit",
    "watch",
    "status",
    "results",
    "report",
    "cancel",
    "retry-failed",
    "delete",
    "list",
    "recover",
)


@pytest.fixture
def tour(redis_url: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A folder as a newcomer's, and a simulated worker that serves what the README calls llama."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\nnot json\n{"prompt": "two"}\n')
    env = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")} | {
        "PAGEMILL_REDIS_URL": redis_url,
        "PAGEMILL_STORE": str(tmp_path / "store"),
        "HOME": str(tmp_path),
    }
    model = f"llama-{uuid.uuid4().hex[:8]}"
    worker = subprocess.Popen(
        [sys.executable, "-m", "pagemill.worker.main"],
        env=env | {"PAGEMILL_ENGINE": "simulated", "PAGEMILL_MODEL": model},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield env | {"MODEL": model, "FOLDER": str(tmp_path)}
    finally:
        worker.terminate()
        assert worker.wait(timeout=30) == 0


async def test_the_readme_s_tour_goes_from_submit_to_delete(tour: dict[str, str]) -> None:
    block = next(block for block in blocks(ROOT / "README.md") if "pagemill submit" in block)
    found = [shlex.split(line, comments=True) for line in block.splitlines() if line.startswith("pagemill ")]
    steps = [words for words in found if words[1] in TOUR]
    assert [words[1] for words in steps][:2] == ["submit", "watch"]
    folder, job = Path(tour["FOLDER"]), ""
    for words in steps:
        words = [{"llama": tour["MODEL"], "JOB": job}.get(word, word) for word in words]
        child = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "pagemill"), *words[1:], cwd=folder, env=tour,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = (part.decode() for part in await child.communicate())
        # It has ended by then, which is the conflict that the README's table of exit codes has.
        expected = {"cancel": 4}.get(words[1], 0)
        if words[1] == "retry-failed":  # a bad line stays one, so nothing is left to run
            assert child.returncode in (0, 2, 4), err
            continue
        assert child.returncode == expected, f"{words}: {err}"
        if words[1] == "submit":
            job = out.strip()
        if words[1] == "status":
            told = json.loads(out)
            assert (told["state"], told["completed"], told["failed"]) == ("completed", 2, 1)
        if words[1] == "report":
            assert job in (folder / words[words.index("-o") + 1]).read_text()
