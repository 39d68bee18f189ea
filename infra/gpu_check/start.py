"""How processes for the parts are started: forked, unless some library has touched the device by then.

A forked process has everything imported and starts in no time, but cannot use a device that its parent has
asked anything of. Then each part starts anew, which takes seconds more.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import torch

START_SECONDS = 120


def way_to_start(dry: bool) -> str:
    """`fork` or `spawn`; raises RuntimeError with the reason where there is no CUDA device to be had."""
    if dry:
        return "fork"
    reasons = []
    for way in ("fork", "spawn"):
        reason = _tried(way)
        if reason is None:
            return way
        reasons.append(reason)
    raise RuntimeError(reasons[-1])


def _tried(way: str) -> str | None:
    """Why a process that is started so cannot use the device."""
    context = multiprocessing.get_context(way)
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_touch, args=(its,))
    process.start()
    its.close()
    try:
        answer = mine.recv() if mine.poll(START_SECONDS) else "a process that was to look at the device hangs"
    except EOFError:
        answer = "a process that looked at the device died"
    process.kill()
    process.join()
    return str(answer) or None


def _touch(answer: Connection) -> None:
    try:
        if not torch.cuda.is_available():
            # It says what is wrong.
            torch.cuda.init()
        torch.ones(1, device="cuda").item()
        answer.send("")
    except Exception as error:
        answer.send(" ".join(str(error).split())[:300] or type(error).__name__)
