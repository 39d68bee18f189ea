"""From options to an exit status: which parts there are, in which order they run, and what is printed."""

from __future__ import annotations

import argparse
import itertools
import logging
import platform
import shlex
import sys
import time
import warnings
from typing import Any

import torch
import transformers
import triton

from gpu_check import (
    attention_speed,
    ceilings,
    check_attention,
    check_linear,
    check_sample,
    check_small,
    exactness,
    offline,
    rehearsal,
    report,
    speeds,
)
from gpu_check.case import check_all
from gpu_check.fault import Fault
from gpu_check.record import Findings
from gpu_check.run import Part, run_parts
from gpu_check.setting import Setting
from gpu_check.start import way_to_start

LEAST = {"torch": (2, 11), "triton": (3, 6), "transformers": (5, 16)}


def _kernels(setting: Setting, findings: Findings) -> None:
    rooms = (check_attention, check_small, check_sample, check_linear)
    check_all(itertools.chain.from_iterable(room.cases(setting) for room in rooms), setting, findings)


PARTS = (
    Part("kernels", "Kernels against float64", _kernels, 100, timed=False, cut=True),
    Part("exactness", "The engine's tokens", exactness.run, 100, timed=False, cut=True),
    Part("ceilings", "What this card gives at best", ceilings.run, 20),
    Part("speeds", "Kernels against these ceilings", speeds.run, 40),
    Part("attention", "Attention against these ceilings, and torch's", attention_speed.run, 45),
    Part(
        "transformers-llama",
        "transformers, Llama-3.1-8B",
        offline.their_llama,
        70,
    ),
    Part("llama", "The engine, Llama-3.1-8B", offline.our_llama, 90),
    Part(
        "transformers-qwen",
        "transformers, Qwen3-0.6B",
        offline.their_qwen,
        40,
    ),
    Part("qwen", "The engine, Qwen3-0.6B", offline.our_qwen, 50),
)


def check_this_machine(options: argparse.Namespace) -> int:
    if options.list:
        print("\n".join(f"{part.name:24}{part.seconds:4.0f} s  {part.title}" for part in PARTS))
        return 0
    known = {part.name: part for part in PARTS}
    if unknown := [name for name in options.part if name not in known]:
        print(f"gpu-check knows {', '.join(known)}, not {unknown[0]}", file=sys.stderr)
        return 2
    if reason := _unfit():
        print(f"gpu-check: {reason}", file=sys.stderr)
        return 2
    try:
        fault = Fault.parse(options.fault) if options.fault else None
    except ValueError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    _hush(options)
    if options.dry_run:
        rehearsal.mend()
    device = torch.device("cpu" if options.dry_run else "cuda")
    try:
        start = way_to_start(options.dry_run)
    except RuntimeError as error:
        print(f"gpu-check: {error}; --dry-run goes through everything without a device", file=sys.stderr)
        return 2
    setting = Setting(device, options.dry_run, options.seed, fault=fault, only=options.only, start=start)
    chosen = [known[name] for name in known if not options.part or name in options.part]
    if any(part.timed for part in chosen) and known["ceilings"] not in chosen:
        # Without them there is nothing to hold the others against.
        chosen.insert(0, known["ceilings"])
    started = time.monotonic()
    found = run_parts(chosen, setting, lambda line: print(line, file=sys.stderr, flush=True))
    machine = _machine()
    print(f"{shlex.join(options.command)} (seed {options.seed})")
    print(
        ", ".join(str(machine[name]) for name in ("card", "processor") if name in machine),
        _versions(),
        sep="; ",
    )
    print(report.table(found, {part.name: part.title for part in PARTS}, dry=options.dry_run))
    if options.json:
        head = {
            "command": shlex.join(options.command),
            "seed": options.seed,
            "dry": options.dry_run,
            "seconds": round(time.monotonic() - started, 1),
            "machine": machine,
        }
        report.save(options.json, head, found)
    return 0 if all(findings.ok for findings in found.values()) else 1


def _hush(options: argparse.Namespace) -> None:
    """What libraries say beside the table: bars, that psutil is missing, that numbers overflow where a card
    would say nothing."""
    transformers.utils.logging.disable_progress_bar()
    if options.dry_run:
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        warnings.filterwarnings("ignore", module=r"triton\.runtime\.interpreter")


def _unfit() -> str | None:
    for library in (torch, triton, transformers):
        name, version = library.__name__, library.__version__
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
        if numbers < LEAST[name]:
            least = ".".join(map(str, LEAST[name]))
            return f"{name} is {version}, and {least} or newer is needed"
    return None


def _versions() -> str:
    return ", ".join(f"{library.__name__} {library.__version__}" for library in (torch, triton, transformers))


def _machine() -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "processor": platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
    }
    # All parts are done, so that the device may be touched.
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        found |= {
            "card": card.name,
            "memory_gib": round(card.total_memory / 2**30, 1),
            "capability": f"{card.major}.{card.minor}",
            "multiprocessors": card.multi_processor_count,
        }
    return found
