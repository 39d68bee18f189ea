"""What runs in one step, and what comes back: the seam between scheduling and running.

The scheduler makes a Batch, a runner turns it into a StepResult. Neither side knows the other; a test
puts a fake runner here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagemill.engine.request import TokenLogprob
from pagemill.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of this step, each with how many of its tokens are to be computed.

    Sequence i computes tokens [num_computed_tokens, num_computed_tokens + num_scheduled[i]); its block
    table already covers them. It samples when that reaches len(token_ids).
    """

    sequences: tuple[Sequence, ...]
    num_scheduled: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled)

    def samples(self, i: int) -> bool:
        """Whether row i of the batch yields a token this step."""
        seq = self.sequences[i]
        return seq.num_computed_tokens + self.num_scheduled[i] == len(seq.token_ids)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry a sequence of the batch, in its order.

    token_ids: the sampled id, or None where the sequence does not sample yet or its logits are not finite.
    finite: False where the row's hidden state or logits hold NaN or Inf: that row alone ends with
        `numeric_error`.
    logprobs: for rows that asked, else None.
    prepare_seconds, sample_seconds: of the time in `execute`, how much went into building inputs and into
        choosing tokens; the rest counts as the forward pass.
    """

    token_ids: tuple[int | None, ...]
    finite: tuple[bool, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    prepare_seconds: float = 0.0
    sample_seconds: float = 0.0


class Runner(Protocol):
    """Runs batches. The only thing that holds weights and KV memory."""

    def execute(self, batch: Batch) -> StepResult:
        """Compute keys and values of every scheduled token; sample where all of a row's tokens are in."""
        ...
