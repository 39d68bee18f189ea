"""A CUDA device as the runner uses it: copies, graphs, memory, facts; all that is CUDA's own is in this file.

`Card` is the seam. `CudaCard` is a device; simulated_card.py is one made of tensors of the CPU, for tests and
rehearsals. Everything is put on one stream, so what is begun later sees what was begun before, and memory
that is freed may be used again at once. This file may not know models, rows or steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

# Triton's matrix products in bfloat16, asynchronous copies into shared memory, and 163 KiB of it, which the
# tiles of attention are cut for, come with Ampere; kernels are compiled and looked at for nothing older.
LEAST_CAPABILITY = (8, 0)
WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class CardFacts:
    """capability: compute capability, major and minor. total, free: bytes of its memory."""

    index: int
    name: str
    capability: tuple[int, int]
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Look:
    """What torch sees. built: the CUDA release it was built for, None for a build without. driver: of the
    cards, where the system says. problem: in torch's words, why there are no cards though it was built for
    some."""

    built: str | None
    driver: str | None
    cards: tuple[CardFacts, ...]
    problem: str | None = None


def look() -> Look:
    """Asks torch; raises nothing."""
    built, driver = torch.version.cuda, _driver()
    try:
        cards = tuple(map(_facts, range(torch.cuda.device_count()))) if torch.cuda.is_available() else ()
        if built is not None and not cards:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # which says what is wrong
        return Look(built, driver, cards)
    except Exception as error:
        problem = " ".join(str(error).split()) or type(error).__name__
        return Look(built, driver, (), problem if built is not None else None)


def _facts(index: int) -> CardFacts:
    free, total = torch.cuda.mem_get_info(index)
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    return CardFacts(index, name, capability, total, free)


def _driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    with suppress(OSError):
        found = re.search(r"\b(\d{3,}\.[\d.]+)\b", file.read_text())
        return found[1] if found else None
    return None


class Fetch(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[Tensor]:
        """Waits for the step that they come from, and gives them as tensors of the CPU."""
        ...


class Graph(Protocol):
    def replay(self) -> None:
        """Does once more what was captured, on the same addresses."""
        ...


class Card(Protocol):
    """device: where its tensors live."""

    device: torch.device

    def facts(self) -> CardFacts: ...

    def active(self) -> AbstractContextManager[None]:
        """What is launched inside goes to this card. To be entered by each thread that launches anything."""
        ...

    def set_arithmetic(self, deterministic: bool) -> None:
        """How the library's matrix products may round, for the whole process."""
        ...

    def free_bytes(self) -> int:
        """What this process may still take, with what it has freed itself."""
        ...

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Does it, and says how much more memory there was in use meanwhile than before."""
        ...

    def give_back_freed(self) -> None: ...

    def host_words(self, count: int) -> Tensor:
        """int32 [count] on the host that `send` can copy from while the host goes on."""
        ...

    def send(self, words: Tensor, to: Tensor) -> None:
        """Copies host_words to the device in order with the steps. The host's must stay as they are until a
        step that was begun after has been waited for."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Fetch:
        """Begins to copy them to the host, in order with the steps."""
        ...

    def capture(self, work: Callable[[], None], pool: object) -> Graph:
        """Does it a few times, so that its kernels are there, and then records it; nothing in it may wait for
        the device. pool: of `graph_pool`."""
        ...

    def graph_pool(self) -> object:
        """Memory that graphs have in common, of which one runs at a time."""
        ...


class CudaCard:
    """See Card."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = torch.device("cuda", index)

    def facts(self) -> CardFacts:
        return _facts(self.index)

    @contextmanager
    def active(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            yield

    def set_arithmetic(self, deterministic: bool) -> None:
        # A model that is asked for in float32 is meant to be computed in it: no products in TF32's ten bits.
        torch.set_float32_matmul_precision("highest")
        products = torch.backends.cuda.matmul
        # Parts of a sum that are added up in 16 bits: quicker for some shapes, but float16 can overflow,
        # which would break a row, and which shapes have parts depends on how many rows there are.
        products.allow_fp16_reduced_precision_reduction = False
        products.allow_bf16_reduced_precision_reduction = not deterministic

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def peak_bytes(self, work: Callable[[], None]) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        torch.cuda.synchronize(self.device)
        # Of reserved memory, not allocated: what lies idle between pieces that are in use is gone as well.
        peak = torch.cuda.max_memory_reserved(self.device) - before
        torch.cuda.empty_cache()
        return peak

    def give_back_freed(self) -> None:
        torch.cuda.empty_cache()

    def host_words(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, pin_memory=True)

    def send(self, words: Tensor, to: Tensor) -> None:
        to.copy_(words, non_blocking=True)

    def fetch(self, tensors: Sequence[Tensor]) -> Fetch:
        copies = []
        for tensor in tensors:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(copy.copy_(tensor, non_blocking=True))
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _CudaFetch(copies, event)

    def capture(self, work: Callable[[], None], pool: Any) -> Graph:
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy or allocate meanwhile; only what this one does must fit into a graph.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()
        return graph

    def graph_pool(self) -> object:
        return torch.cuda.graph_pool_handle()


class _CudaFetch:
    def __init__(self, copies: list[Tensor], event: Any) -> None:
        self._copies, self._event = copies, event

    def wait(self) -> list[Tensor]:
        self._event.synchronize()
        return self._copies
