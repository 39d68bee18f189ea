"""`pagemill doctor`: what is wrong here, and how to mend it, before a job finds out.

It looks at versions, Redis, the store, the model and the device, changes nothing that lasts, and ends with a
word for each: ok, warn (works, with a drawback) or broken. This room may not know how the findings are shown.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pagemill.jobs.errors import PagemillError
from pagemill.jobs.failures import describe
from pagemill.jobs.spec import PROTOCOL
from pagemill.jobs.state import State
from pagemill.jobs.status import WorkerInfo
from pagemill.jobs.storage import open_storage
from pagemill.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from pagemill.engine.run.card import Look

Verdict = Literal["ok", "warn", "broken"]
OLDEST_REDIS = (6, 2)
GIB = 1 << 30
# What changes the speed of a CPU most, fastest first.
CPU_FEATURES = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "asimd")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what was found, and how to mend it where that is needed."""

    name: str
    verdict: Verdict
    found: str
    mend: str = ""


async def examine(settings: WorkerSettings, model: str | None) -> list[Finding]:
    """Everything, in the order of reading. model: the one to look at; None looks at the demo model if it is
    here."""
    findings = [*versions()]
    findings += await redis(settings)
    findings.append(await asyncio.to_thread(storage, settings))
    findings += await asyncio.to_thread(lambda: [*the_model(model), *device()])
    return findings


def versions() -> Iterator[Finding]:
    """Python, and every library that pyproject asks for."""
    python = platform.python_version()
    yield Finding("python", "ok", python)
    for requirement in metadata.requires("pagemill") or []:
        extra = _extra(requirement)
        if extra in (None, "worker", "embedded"):
            yield _library(requirement, extra)
    if (triton := _installed("triton")) is not None:
        fits = _fits(triton, ">=3.6,<3.8")
        mend = "" if fits else "pip install 'triton>=3.6,<3.8' (a CUDA build of torch brings its own)"
        yield Finding("triton", "ok" if fits else "warn", triton, mend)


def _library(requirement: str, extra: str | None) -> Finding:
    name, wanted = _parsed(requirement)
    installed = _installed(name)
    if installed is None:
        install = f"pip install 'pagemill[{extra}]'" if extra else "pip install --upgrade pagemill"
        what = {"worker": "a worker needs it", "embedded": "`pagemill run` needs it"}.get(
            extra or "", "needed"
        )
        return Finding(name, "warn" if extra == "embedded" else "broken", f"not installed ({what})", install)
    if not _fits(installed, wanted):
        return Finding(name, "broken", f"{installed}, not {wanted}", f"pip install '{name}{wanted}'")
    return Finding(name, "ok", installed)


def _parsed(requirement: str) -> tuple[str, str]:
    found = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)", requirement)
    assert found is not None
    return found[1], found[2].strip().strip("()").replace(" ", "")


def _extra(requirement: str) -> str | None:
    found = re.search(r"""extra\s*==\s*['"]([^'"]+)""", requirement)
    return found[1] if found else None


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fits(version: str, wanted: str) -> bool:
    """Whether a version lies within bounds such as ">=2.11,<2.14", by its leading numbers."""
    ours = _numbers(version)
    for bound in filter(None, wanted.split(",")):
        sign, limit = re.match(r"(<=|>=|<|>|==|!=|~=)(.*)", bound).groups()  # type: ignore[union-attr]
        theirs = _numbers(limit)
        width = max(len(ours), len(theirs))
        a, b = (tuple((*n, *(0,) * width)[:width]) for n in (ours, theirs))
        if not {"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b, "==": a == b, "!=": a != b}.get(
            sign, True
        ):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]*", version.strip())[0].split(".") if part)  # type: ignore[index]


async def redis(settings: WorkerSettings) -> list[Finding]:
    """Whether Redis answers, is new enough, and will keep what it is told."""
    start = "Start Redis, or name it with --redis-url or PAGEMILL_REDIS_URL (`pagemill run` brings its own)."
    try:
        state = await State.connect(settings.redis_url, patience_s=1.0)
        try:
            facts = await state.facts()
            workers = await state.workers()
        finally:
            await state.close()
    except Exception as error:
        return [Finding("redis", "broken", describe(error)[0], start)]
    findings = [
        _version(facts.version, state.scripts.address),
        _eviction(facts.maxmemory_policy),
        _persistence(facts.persistent),
        _protocol(facts.protocol),
    ]
    findings.append(Finding("workers", "ok", _served(workers)))
    return findings


def _served(workers: Sequence[WorkerInfo]) -> str:
    """How many there are, which models are loaded, and which could be."""
    loaded = {worker.loaded for worker in workers if worker.loaded}
    allowed = {name for worker in workers for name in worker.models} - loaded
    text = f"{len(workers)} running, serving {', '.join(sorted(loaded)) or 'no model'}"
    return f"{text}; {', '.join(sorted(allowed))} when asked for" if allowed else text


def _version(version: str, address: str) -> Finding:
    old = _numbers(version)[:2] < OLDEST_REDIS
    mend = "Older than 6.2, which is the oldest that is tested: upgrade it." if old else ""
    return Finding("redis", "warn" if old else "ok", f"{version} at {address}", mend)


def _persistence(on: bool) -> Finding:
    if on:
        return Finding("redis persistence", "ok", "on")
    mend = "A restart loses the state of jobs (their objects stay): set appendonly yes."
    return Finding("redis persistence", "warn", "off", mend)


def _eviction(policy: str) -> Finding:
    if policy == "noeviction":
        return Finding("redis eviction", "ok", policy)
    if not policy:
        return Finding(
            "redis eviction", "warn", "not shown to us", "See to it that maxmemory-policy is noeviction."
        )
    mend = "Redis may throw jobs away: CONFIG SET maxmemory-policy noeviction."
    return Finding("redis eviction", "broken", policy, mend)


def _protocol(theirs: int | None) -> Finding:
    if theirs in (None, PROTOCOL):
        return Finding("protocol", "ok", f"version {PROTOCOL}" + ("" if theirs else ", this Redis is fresh"))
    mend = "Install the same version everywhere, or use another Redis (or another database number)."
    return Finding("protocol", "broken", f"this Redis holds version {theirs}, we speak {PROTOCOL}", mend)


def storage(settings: WorkerSettings) -> Finding:
    """Whether the store can be reached, written, and written conditionally."""
    try:
        store = open_storage(settings.store, settings.storage_options())
        store.check()
    except Exception as error:
        mend = (
            "Name the store with --store or PAGEMILL_STORE, its keys with PAGEMILL_S3_* or AWS_* variables."
        )
        return Finding("storage", "broken", describe(error)[0], mend)
    return Finding("storage", "ok", f"{store.url}: reads, writes, and writes conditionally")


def the_model(model: str | None) -> Iterator[Finding]:
    """Whether the model is found, and is of a kind that can be run. Its weights are not read."""
    if _installed("torch") is None:
        return
    try:
        from pagemill.engine.errors import EngineError
        from pagemill.engine.weights.load import open_checkpoint
        from pagemill.worker.models import DEMO_NAME, find_demo_model, resolve_model
    except Exception as error:
        yield Finding("model", "broken", describe(error)[0], "pip install --upgrade 'pagemill[worker]'")
        return
    if model is None and find_demo_model() is None:
        yield Finding("model", "warn", "none named, and the demo model is not here", "Name one with --model.")
        return
    try:
        path = resolve_model(model or DEMO_NAME)
        checkpoint = open_checkpoint(path)
    except (PagemillError, EngineError, OSError) as error:
        sentence = describe(error)[0] if isinstance(error, PagemillError | OSError) else str(error)
        yield Finding(
            "model",
            "broken",
            sentence,
            "Give a directory with safetensors, or a .gguf file, of a known family.",
        )
        return
    size = sum(file.stat().st_size for file in checkpoint.files.files)
    layers = checkpoint.spec.num_layers
    yield Finding("model", "ok", f"{path}: {layers} layers, {size / GIB:.2f} GiB of weights")


def device() -> Iterator[Finding]:
    """What there is to compute with."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    features = [name for name in CPU_FEATURES if name in _cpu_flags()]
    total, available = _memory()
    memory = f", {available / GIB:.1f} of {total / GIB:.1f} GiB memory free" if total else ""
    slow = platform.machine() in ("x86_64", "AMD64") and "avx2" not in features
    found = f"{cores} cores, {', '.join(features) or platform.machine()}{memory}"
    mend = "A processor without AVX2 computes many times slower." if slow else ""
    yield Finding("cpu", "warn" if slow else "ok", found, mend)
    if _installed("torch") is None:
        return
    try:
        from pagemill.engine.run.card import look
    except Exception as error:
        yield Finding("cuda", "broken", describe(error)[0], "pip install --upgrade 'pagemill[worker]'")
        return
    yield from cards(look())


def cards(seen: Look) -> Iterator[Finding]:
    """What torch sees of CUDA, and whether an engine runs on it without a flag."""
    from pagemill.engine.run.device import refusal

    if seen.problem is not None:
        yield Finding("cuda", "broken", seen.problem, "Check the driver (nvidia-smi); or use --device cpu.")
        return
    if not seen.cards:
        build = "torch is a build for CPU" if seen.built is None else f"torch is built for CUDA {seen.built}"
        yield Finding("cuda", "ok", f"no card ({build}); the engine runs on the CPU")
        return
    usable = False
    for card in seen.cards:
        kind = ".".join(map(str, card.capability))
        facts = f"{card.name}, compute {kind}, {card.free / GIB:.1f} of {card.total / GIB:.1f} GiB free"
        reason = refusal(card)
        mend = "" if reason is None else f"{reason}. Another card, or --device cpu."
        yield Finding(f"cuda:{card.index}", "ok" if reason is None else "warn", facts, mend)
        usable = usable or reason is None
    driver = f"driver {seen.driver}" if seen.driver else "driver unknown"
    yield Finding("cuda", "ok", f"CUDA {seen.built}, {driver}")
    if usable:
        triton = _installed("triton")
        yield Finding("kernels", "ok", f"Triton {triton}; dense layers by cuBLAS, decodes as CUDA graphs")


def _cpu_flags() -> set[str]:
    return _read_words(
        "/proc/cpuinfo", lambda text: re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    )


def _read_words(path: str, find: Callable[[str], list[str]]) -> set[str]:
    try:
        found = find(Path(path).read_text())
    except OSError:  # not Linux
        return set()
    return set(found[0].split()) if found else set()


def _memory() -> tuple[int, int]:
    """Bytes in all and free; (0, 0) where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 0, 0
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return kib.get("MemTotal", 0) << 10, kib.get("MemAvailable", 0) << 10
