"""The only mutable record of a row in flight.

It may not know who schedules it or what runs it. "Preempted" is not a state of its own: it is WAITING
with `num_computed_tokens = 0` and its tokens kept, so nothing else needs to know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pagemill.engine.request import FinishReason, Request, TokenLogprob


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and how far it has come.

    token_ids: prompt, then what was sampled.
    num_computed_tokens: how many of its tokens have keys and values in memory, or will have when the steps
        that were begun have run; it chases `num_tokens`, and whatever lies between is the work left to do.
        Chunked prefill, a prefix hit, decoding and recompute after preemption are this one subtraction.
    num_unread_steps: steps that the row is in, that were begun, and whose results nobody has read.
    num_unread_tokens: tokens that those steps draw. The device has them, and they are not in `token_ids`.
    num_cached_tokens: of the prompt, how many the prefix cache gave at first admission.
    block_table: ids of the memory blocks that hold tokens [16 * i, 16 * (i + 1)).
    block_hashes: chain hash of each full block known so far.
    arrival: order of arrival, fixed for life: preemption takes the latest first.
    priority: the highest of those who want this row's tokens. work: what it is expected to cost, set when it
        begins to wait. parked: it waits for another row to compute its prefix, and stands in no queue.
    long_rope: whether its keys turn by the frequencies of texts beyond the model's original context.
    """

    request: Request
    arrival: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_unread_steps: int = 0
    num_unread_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    long_rope: bool = False
    priority: int = 0
    work: float = 0.0
    parked: bool = False
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error_code: str | None = None
    error_message: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_preemptions: int = 0
    started_at: float | None = None
    first_token_at: float | None = None

    @classmethod
    def of(cls, request: Request, arrival: int) -> Sequence:
        return cls(
            request=request,
            arrival=arrival,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            priority=request.priority,
        )

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Those that nobody has read included."""
        return len(self.token_ids) + self.num_unread_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens
