"""What runs in one step, and what comes back: the seam between scheduling and running.

The scheduler makes a Batch, a runner turns it into a StepResult, perhaps while the next is scheduled. Neither
side knows the other; a test puts a fake runner here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pagemill.engine.request import TokenLogprob
from pagemill.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of this step, each with how many of its tokens are to be computed.

    Sequence i computes tokens [starts[i], starts[i] + num_scheduled[i]); its block table already covers them.
    It samples when that reaches lengths[i]. starts and lengths are the sequences' own when the batch is made:
    by the time that its result is read these may have gone on.
    """

    sequences: tuple[Sequence, ...]
    num_scheduled: tuple[int, ...]
    starts: tuple[int, ...] = field(init=False)
    lengths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", tuple(seq.num_computed_tokens for seq in self.sequences))
        object.__setattr__(self, "lengths", tuple(seq.num_tokens for seq in self.sequences))

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled)

    def samples(self, i: int) -> bool:
        """Whether row i of the batch yields a token this step."""
        return self.starts[i] + self.num_scheduled[i] == self.lengths[i]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry a sequence of the batch, in its order.

    token_ids: the sampled id, or None where the sequence does not sample yet or its logits are not finite.
    finite: False where the row's hidden state or logits hold NaN or Inf: that row alone ends with
        `numeric_error`.
    logprobs: for rows that asked, else None.
    prepare_seconds, sample_seconds: of the time that the step has taken of the host, how much went into
        building inputs and into choosing tokens; the rest counts as the forward pass.
    """

    token_ids: tuple[int | None, ...]
    finite: tuple[bool, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    prepare_seconds: float = 0.0
    sample_seconds: float = 0.0


# Waits until a step has run, and gives its result. To be called once, in the order of the steps.
ReadResult = Callable[[], StepResult]


class Runner(Protocol):
    """Runs batches. The only thing that holds weights and KV memory.

    depth: how many steps may have been begun, and not been read, when another is begun. With 0 a result is
    there at once; with 1 the tokens that one step draws go into the next before anybody has read them, and a
    sequence's `num_unread_tokens` says that there are some.
    """

    @property
    def depth(self) -> int: ...

    def begin(self, batch: Batch) -> ReadResult:
        """Compute keys and values of every scheduled token; sample where all of a row's tokens are in.

        Raises StepTooLarge where memory does not suffice for the step: then nothing has happened that
        matters, and the same rows may be begun again.
        """
        ...
