"""Who takes part in a comparison: the commands that run each one, and the models in the form each loads.

It starts processes and reads what they wrote; it measures and judges nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# How optimum calls them.
EXPORTS = {"float32": "fp32", "bfloat16": "fp16", "int8": "int8"}


@dataclass(frozen=True, slots=True)
class Contender:
    """One engine with one set of settings.

    words: the command, without workloads and files. kind: what its weights are. one_by_one: a process for
    each workload; the others take all of them in one, as they may need minutes to start.
    """

    name: str
    words: tuple[str, ...]
    ours: bool
    kind: str
    one_by_one: bool = False
    environment: dict[str, str] = field(default_factory=dict)


class Failed(Exception):
    """A command ended badly; its last words."""


def ours(name: str, settings: str, options: argparse.Namespace) -> Contender:
    """settings: arguments of engine.py, which go before those of the comparison."""
    words = shlex.split(settings)
    kind = _after(words, "--quantization") or _after(words, "--dtype") or options.dtype
    if "--dtype" not in words:
        words += ["--dtype", options.dtype]
    command = (sys.executable, str(HERE / "engine.py"), "--model", options.model, *words)
    return Contender(name, command, ours=True, kind=kind, one_by_one=True)


def peers(options: argparse.Namespace) -> list[Contender]:
    """Those whose environments were given, each with its model, which is made where it is not there yet."""
    found = []
    if options.vllm:
        found.append(_peer("vllm", options.vllm, directory(options, options.dtype), options))
    if options.openvino:
        found.append(_peer("openvino", options.openvino, exported(options, options.dtype), options))
        found.append(_peer("openvino", options.openvino, exported(options, "int8"), options, "int8"))
    if options.transformers:
        found.append(_peer("transformers", options.transformers, directory(options, options.dtype), options))
    return found


def _peer(
    engine: str, venv: Path, model: Path, options: argparse.Namespace, quantization: str | None = None
) -> Contender:
    words = [str(venv / "bin" / "python"), str(HERE / "peers.py"), "--engine", engine, "--model", str(model)]
    words += ["--dtype", options.dtype]
    if quantization:
        words += ["--quantization", quantization]
    for option in options.peer_option:
        name, _, pair = option.partition(":")
        if name == engine:
            words += ["--option", pair]
    kind = quantization or options.dtype
    return Contender(f"{engine} {kind}", tuple(words), ours=False, kind=kind)


def directory(options: argparse.Namespace, dtype: str) -> Path:
    """The model as safetensors. It is made once in each type."""
    folder = Path(options.folder) / "models" / dtype

    def make(half: Path) -> list[str]:
        convert = [sys.executable, str(HERE / "convert.py"), "--model", options.model]
        return [*convert, "--dtype", dtype, "--folder", str(half)]

    return _made(folder, make)


def exported(options: argparse.Namespace, kind: str) -> Path:
    """The model as OpenVINO's, from float32."""
    folder = Path(options.folder) / "models" / f"openvino-{kind}"

    def make(half: Path) -> list[str]:
        cli = [str(options.openvino / "bin" / "optimum-cli"), "export", "openvino"]
        cli += ["--task", "text-generation-with-past", "--weight-format", EXPORTS[kind]]
        return [*cli, "--model", str(directory(options, "float32")), str(half)]

    return _made(folder, make)


def _made(folder: Path, command: Callable[[Path], Sequence[str]]) -> Path:
    """Runs the command for a folder beside and renames it, so that half a model is never found."""
    if not folder.is_dir():
        half = folder.with_name(folder.name + ".part")
        half.parent.mkdir(parents=True, exist_ok=True)
        print(f"making {folder}", file=sys.stderr)
        launch(command(half), folder.with_name(folder.name + ".log"), {"HF_HUB_OFFLINE": "1"})
        half.rename(folder)
    return folder


def run(who: Contender, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One round of a contender: its records, one for each workload. Logs and records stay in `folder`."""
    records: list[dict[str, Any]] = []
    groups = [[w] for w in options.workload] if who.one_by_one else [options.workload]
    for group in groups:
        stem = f"{who.name.replace(' ', '-')}-{'-'.join(group)}"
        result = folder / f"{stem}.json"
        words = [*who.words, "--workload", *group, "--json", str(result), *_shared(options)]
        launch(words, folder / f"{stem}.log", who.environment, options.timeout)
        found = json.loads(result.read_text())
        records += found if isinstance(found, list) else [found]
    return records


def _shared(options: argparse.Namespace) -> list[str]:
    words = ["--workloads", str(options.workloads), "--threads", str(options.threads)]
    for name in ("rows", "max_tokens", "reference"):
        value = getattr(options, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def launch(
    words: Sequence[str], log: Path, environment: dict[str, str], timeout: float | None = None
) -> None:
    """Waits for a command; raises Failed with its last line when it fails or takes too long."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        try:
            code = subprocess.run(
                words,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                timeout=timeout,
                check=False,
            ).returncode
        except OSError as error:
            raise Failed(f"{words[0]}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise Failed(f"It took more than {timeout:.0f} s.") from error
    if code:
        said = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        raise Failed(f"{said[-1]} (exit code {code}; {log.name})")


def _after(words: Sequence[str], flag: str) -> str | None:
    return words[words.index(flag) + 1] if flag in words[:-1] else None
