"""A card that is not there: tensors of the CPU behind the seam of card.py, for tests and rehearsals.

What it is strict about is what goes wrong on a real one without a word: reading a result before its step is
done finds other numbers, changing what is being copied is an error, and so is waiting for the device inside
a graph. A graph is the function it was captured from, done again. Kernels in Triton are interpreted
(kernels/choice.py), so models and steps have to be tiny.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagemill.engine.run.card import LEAST_CAPABILITY, CardFacts, Fetch, Graph

GIB = 1 << 30
# What a peak is said to be; how much a step really takes is not known here.
STEP_BYTES = 64 << 20
# Operations whose result the host must have before it can go on.
WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "equal")


class SimulatedCard:
    """See card.Card. memory: bytes it is said to have, of which steps and what `taken` counts use some."""

    def __init__(self, memory: int = GIB, capability: tuple[int, int] = LEAST_CAPABILITY) -> None:
        self.device = torch.device("cpu")
        self.memory = memory
        self.capability = capability
        self.replays = 0
        self._sent: list[tuple[Tensor, Tensor]] = []  # what is being copied, and what it was at first

    def facts(self) -> CardFacts:
        return CardFacts(0, "simulated card", self.capability, self.memory, self.memory)

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def set_arithmetic(self, deterministic: bool) -> None:
        torch.set_float32_matmul_precision("highest")

    def free_bytes(self) -> int:
        return self.memory

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return STEP_BYTES

    def give_back_freed(self) -> None:
        return

    def host_words(self, count: int) -> Tensor:
        return torch.full((count,), -(2**31), dtype=torch.int32)

    def send(self, words: Tensor, to: Tensor) -> None:
        to.copy_(words)
        self._sent.append((words, words.clone()))

    def fetch(self, tensors: Sequence[Tensor]) -> Fetch:
        sent, self._sent = self._sent, []
        return _SimulatedFetch([tensor.clone() for tensor in tensors], sent)

    def capture(self, work: Callable[[], None], pool: object) -> Graph:
        with _NoWaiting():  # type: ignore[no-untyped-call]
            work()
        return _SimulatedGraph(self, work)

    def graph_pool(self) -> object:
        return None


class _SimulatedFetch:
    def __init__(self, results: list[Tensor], sent: list[tuple[Tensor, Tensor]]) -> None:
        self._results, self._sent = results, sent

    def wait(self) -> list[Tensor]:
        for words, before in self._sent:
            if not torch.equal(words, before):
                raise AssertionError("The host has changed what was being copied to the card.")
        return self._results


class _SimulatedGraph:
    def __init__(self, card: SimulatedCard, work: Callable[[], None]) -> None:
        self._card, self._work = card, work

    def replay(self) -> None:
        self._card.replays += 1
        with _NoWaiting():  # type: ignore[no-untyped-call]
            self._work()


class _NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, an operation that would have the host wait for the device is an error."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.overloadpacket.__name__ in WAITING:
            raise AssertionError(f"{function} waits for the device, inside a graph.")
        return function(*args, **(kwargs or {}))
