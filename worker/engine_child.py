"""The engine's process: rows come down one pipe, completions go up it, and it dies when the pipe closes.

    data in      a thread: decode, tokenise, hand to the engine
    data out     a thread: whatever is finished, as fast as the pipe takes it
    control      a thread: aborts, shutdown, and the end of the worker
    beats        a thread: figures twice a second
    main         load, then the engine's steps

Each direction has its own reader, and what is finished waits in memory for at most as many rows as the worker
holds credits for; so neither side can wait for the other. A step that raises ends the process: the worker
starts it again and knows from the board which rows were in that step. Started by engine_process.py as
`python -m pagemill.worker.engine_child DATA_FD CONTROL_FD BOARD_FD`; it may not know jobs' state or storage.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from typing import Any, Protocol

from pagemill.worker.credits import rows_in_flight
from pagemill.worker.engine_process import OUT_OF_MEMORY
from pagemill.worker.models import resolve_model
from pagemill.worker.wire import Board, Lines, decode, encode

Message = dict[str, Any]
BEAT_S = 0.5
READ_BYTES = 1 << 18
DOOMED = 4096


class Backend(Protocol):
    """An engine as this process drives it. All but `load` and `run` are called from other threads."""

    def load(self) -> Message:
        """Load, and say what was loaded: model, fingerprint, dtype, device, context, kv_tokens."""
        ...

    def submit(self, message: Message, arrived: float) -> None: ...
    def abort(self, rids: Iterable[str]) -> None: ...
    def figures(self) -> dict[str, float]: ...
    def run(self) -> None: ...


class Child:
    """The plumbing around one backend."""

    def __init__(self, data: socket.socket, control: socket.socket, board: Board) -> None:
        self._data, self._control, self._board = data, control, board
        self._finished: SimpleQueue[Message] = SimpleQueue()
        self._outstanding: set[str] = set()
        # Aborts that overtook their rows: control is the faster way down. Bounded, since an abort may also
        # come after its row has ended, and nothing tells the two apart.
        self._doomed: OrderedDict[str, None] = OrderedDict()
        self._judging = threading.Lock()
        self._speaking = threading.Lock()
        self._control_lines = Lines()

    def run(self) -> None:
        start = self._first_message()
        threading.Thread(target=self._obey, daemon=True, name="control").start()
        began = time.monotonic()
        try:
            self._backend = backend = make_backend(start, self._board, self._finish)
            loaded = backend.load()
        except Exception as error:
            if not _foreseen(error):  # else its sentence says it all, and this goes to somebody's terminal
                traceback.print_exc()
            self._tell({"op": "failed", "message": _sentence(error)})
            quit_now(3)
        by_itself = rows_in_flight(loaded.pop("step_rows"))
        rows = start["rows"] or by_itself
        loaded |= {"rows": rows, "load_seconds": round(time.monotonic() - began, 3)}
        self._tell({"op": "ready", **loaded})
        threading.Thread(target=self._take_rows, args=(rows,), daemon=True, name="data in").start()
        threading.Thread(target=self._give_completions, daemon=True, name="data out").start()
        threading.Thread(target=self._beat, daemon=True, name="beats").start()
        try:
            backend.run()
        except BaseException as error:
            traceback.print_exc()
            if _out_of_memory(error):
                quit_now(OUT_OF_MEMORY)
        quit_now(4)

    def _first_message(self) -> Message:
        while True:
            chunk = self._control.recv(READ_BYTES)
            if not chunk:
                quit_now(0)
            for line in self._control_lines.feed(chunk):
                return decode(line)

    def _obey(self) -> None:
        """The control channel; its end is the worker's end, and this process has no reason left to live."""
        while chunk := _received(self._control):
            for line in self._control_lines.feed(chunk):
                message = decode(line)
                if message["op"] == "abort":
                    self._abort(message["rids"])
                elif message["op"] == "shutdown":
                    quit_now(0)
        quit_now(0)

    def _abort(self, rids: list[str]) -> None:
        with self._judging:
            here = [rid for rid in rids if rid in self._outstanding]
            self._doomed.update(dict.fromkeys(rid for rid in rids if rid not in self._outstanding))
            while len(self._doomed) > DOOMED:
                self._doomed.popitem(last=False)
        self._backend.abort(here)

    def _admit(self, rid: str, credits: int) -> bool:
        """Whether a row that came down is to be run."""
        with self._judging:
            if rid in self._doomed:
                del self._doomed[rid]
                self._finish({"rid": rid, "status": "aborted"})
                return False
            self._outstanding.add(rid)
        if len(self._outstanding) > credits:
            raise_and_quit(f"the worker sent a row more than its {credits} credits")
        return True

    def _take_rows(self, credits: int) -> None:
        lines = Lines()
        while chunk := _received(self._data):
            arrived = time.monotonic()
            for line in lines.feed(chunk):
                message = decode(line)
                if self._admit(message["rid"], credits):
                    self._backend.submit(message, arrived)
        quit_now(0)

    def _finish(self, message: Message) -> None:
        self._outstanding.discard(message["rid"])
        self._finished.put(message)

    def _give_completions(self) -> None:
        while True:
            batch = [encode(self._finished.get())]
            while not self._finished.empty() and len(batch) < 256:
                batch.append(encode(self._finished.get()))
            try:
                self._data.sendall(b"".join(batch))
            except OSError:
                quit_now(0)

    def _beat(self) -> None:
        while True:
            self._tell({"op": "beat", "figures": self._backend.figures()})
            time.sleep(BEAT_S)

    def _tell(self, message: Message) -> None:
        with self._speaking:
            try:
                self._control.sendall(encode(message))
            except OSError:
                quit_now(0)


def make_backend(start: Mapping[str, Any], board: Board, emit: Callable[[Message], None]) -> Backend:
    """Imports only what it is told to: the simulated engine starts without torch."""
    if start["engine"] == "simulated":
        from pagemill.worker.simulated import SimulatedEngine

        return SimulatedEngine(start, board, emit)
    # Before torch, which takes seconds to import: a model that is not there should say so at once.
    source = str(resolve_model(start["model_source"]))
    from pagemill.worker.native import NativeEngine

    return NativeEngine({**start, "model_source": source}, board, emit)


def _received(channel: socket.socket) -> bytes:
    try:
        return channel.recv(READ_BYTES)
    except OSError:
        return b""


def _foreseen(error: Exception) -> bool:
    """Whether it is one of ours, which name what is wrong and how to mend it."""
    return type(error).__module__.startswith("pagemill.")


def _out_of_memory(error: BaseException) -> bool:
    """Python's own, torch's for a GPU, and what torch raises where malloc refuses."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (
        text
        if _foreseen(error) and text
        else f"The model could not be loaded: {type(error).__name__}: {text or 'no reason given'}"
    )


def raise_and_quit(what: str) -> None:
    print(f"engine process: {what}", file=sys.stderr)
    quit_now(5)


def quit_now(code: int) -> None:
    """End without waiting for threads, some of which are in the middle of arithmetic."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        pass  # whoever read our output is gone
    os._exit(code)


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("pagemill").setLevel(logging.INFO)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker decides
    data_fd, control_fd, board_fd = (int(word) for word in sys.argv[1:4])
    sockets = [socket.socket(fileno=fd) for fd in (data_fd, control_fd)]
    for end in sockets:
        end.setblocking(True)
        end.set_inheritable(False)  # a grandchild that held them would keep a dead worker's pipe open
    os.set_inheritable(board_fd, False)
    Child(sockets[0], sockets[1], Board(board_fd)).run()


if __name__ == "__main__":
    main()
