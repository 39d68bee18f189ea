"""The engine: requests in, one step at a time, completions out.

It joins the scheduler (which row computes what), the runner (tensors) and the decoder (text), and holds
what belongs to none of them: who is in flight, and how each row ended. It is used from one thread; the
asyncio side and the thread are in stream.py. It never waits for anything but the runner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from pagemill.engine.batch import Batch, Runner, StepResult
from pagemill.engine.config import (
    DEFAULT_NUM_SEQS,
    DEFAULT_NUM_TOKENS,
    EngineConfig,
    ModelInfo,
    SchedulerConfig,
)
from pagemill.engine.detokenize import PartialText
from pagemill.engine.finish import ending, refusal, text_token_ids
from pagemill.engine.metrics import EngineMetrics, Meter
from pagemill.engine.request import Completion, Delta, Request, Timings, Usage
from pagemill.engine.schedule.scheduler import Scheduler
from pagemill.engine.sequence import Sequence, Status

if TYPE_CHECKING:
    from pagemill.engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one runner.

    Everything that ends, ends through `step`: a refused or aborted request too, with its completion among
    those that the next step returns. So whoever drives the loop has one place to look.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        model_info: ModelInfo,
        limits: SchedulerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        before_step: Callable[[Batch], None] | None = None,
        rows_allowed: Callable[[], int] | None = None,
    ) -> None:
        """before_step: called with each batch before it runs, so that a caller may note down who is in it.
        rows_allowed: asked before each step how many rows may run; more than the limits' do not.
        """
        self.tokenizer = tokenizer
        self.model_info = model_info
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self.before_step = before_step
        self.rows_allowed = rows_allowed
        self._runner = runner
        self._clock = clock
        self._arrivals = 0
        self._rows: dict[str, Sequence] = {}
        self._texts: dict[str, PartialText] = {}
        self._streamed: dict[str, int] = {}  # request id -> output tokens already in deltas
        self._ended: list[Completion] = []
        self._deltas: list[Delta] = []
        self._meter = Meter(limits.max_num_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self._rows or self._ended)

    @property
    def num_steps(self) -> int:
        return self._meter.steps

    def add(self, request: Request, *, stream: bool = False) -> None:
        """Take a request in. One that can never run becomes an error completion of the next step.

        stream: collect its tokens as they come, for `take_deltas`.
        Raises ValueError when a request of that id is in flight.
        """
        if request.request_id in self._rows:
            raise ValueError(f"A request {request.request_id!r} is already in flight.")
        seq = Sequence.of(request, self._arrivals, self._clock())
        self._arrivals += 1
        self._rows[request.request_id] = seq
        if stream:
            self._streamed[request.request_id] = 0
        if stream or request.sampling.stop:
            self._texts[request.request_id] = self._partial_text(request)
        refused = refusal(request, self.model_info, self.limits)
        if refused is not None:
            seq.status = Status.FINISHED  # the scheduler never sees it
            self._end_with_error(seq, refused.code, refused.message)
        else:
            self.scheduler.add(seq)

    def abort(self, request_id: str) -> bool:
        """End a row now, waiting or running; False when it is not in flight (any more)."""
        seq = self._rows.get(request_id)
        if seq is None:
            return False
        seq.finish_reason = "abort"
        self._end(seq)
        return True

    def abort_all(self) -> None:
        for request_id in list(self._rows):
            self.abort(request_id)

    def step(self) -> list[Completion]:
        """Run one batch and return every row that has ended since the last step."""
        started = self._clock()
        if self.rows_allowed is not None:
            self.scheduler.max_num_seqs = min(self.rows_allowed(), self.limits.max_num_seqs)
        batch = self.scheduler.schedule()
        if batch.sequences:
            scheduled = self._clock()
            for seq in batch.sequences:
                if seq.started_at is None:
                    seq.started_at = scheduled
            if self.before_step is not None:
                self.before_step(batch)
            result = self._runner.execute(batch)
            executed = self._clock()
            self._meter.step(batch, result, scheduled - started, executed - scheduled, executed)
            self._book(batch, result, executed)
            self._meter.finish_s += self._clock() - executed
        ended, self._ended = self._ended, []
        self._meter.finished += len(ended)
        return ended

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Run requests to their end in this thread, completions in the order in which they finish."""
        for request in requests:
            self.add(request)
        while self.has_work:
            yield from self.step()

    def take_deltas(self) -> list[Delta]:
        """What streamed rows have produced since the last call, each row's last delta with its completion."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def fail_all(self, message: str) -> list[Completion]:
        """End every row with `engine_error`, after a step has raised; the engine is not to be used again."""
        for seq in list(self._rows.values()):
            # What a step left half done is not touched: giving memory back could raise, and helps nobody.
            seq.status = Status.FINISHED
            self._end_with_error(seq, "engine_error", message)
        ended, self._ended = self._ended, []
        return ended

    def metrics(self) -> EngineMetrics:
        scheduler, meter = self.scheduler, self._meter
        return EngineMetrics(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            rows_allowed=scheduler.max_num_seqs,
            blocks_used=scheduler.pool.num_used,
            blocks_total=scheduler.pool.num_blocks,
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            prefilled_tokens=meter.prefilled,
            generated_tokens=meter.generated,
            finished=meter.finished,
            preemptions=scheduler.preemptions,
            steps=meter.steps,
            batch_fill=meter.batch_fill,
            tokens_per_second=meter.tokens_per_second(self._clock()),
            schedule_seconds=meter.schedule_s,
            prepare_seconds=meter.prepare_s,
            forward_seconds=meter.forward_s,
            sample_seconds=meter.sample_s,
            finish_seconds=meter.finish_s,
        )

    def _book(self, batch: Batch, result: StepResult, now: float) -> None:
        """Give every row of the batch what the step made of it."""
        self.scheduler.advance(batch, result.finite)
        for i, seq in enumerate(batch.sequences):
            if not result.finite[i]:
                self._end_with_error(
                    seq,
                    "numeric_error",
                    "The model's output for this row is not a finite number (NaN or Inf).",
                )
                continue
            token = result.token_ids[i]
            if seq.num_uncomputed_tokens:
                continue
            if token is None:
                raise RuntimeError("The runner gave no token for a row whose tokens are all computed.")
            seq.token_ids.append(token)
            logprob = result.logprobs[i]
            if logprob is not None:
                seq.logprobs.append(logprob)
            if seq.first_token_at is None:
                seq.first_token_at = now
            self._after_token(seq)

    def _after_token(self, seq: Sequence) -> None:
        """End the row if its new token ends it; pass on what a streamed row has to show."""
        request_id = seq.request.request_id
        partial = self._texts.get(request_id)
        match = None
        if partial is not None:
            try:
                partial.advance(seq.output_token_ids)
            except Exception as error:
                self._end_with_error(seq, *_undecodable(error))
                return
            match = partial.match[1] if partial.match is not None else None
        end = ending(seq, self.model_info.eos_token_ids, self.limits.max_tokens_per_row, match)
        if end is not None:
            seq.finish_reason, seq.stop_reason = end.reason, end.stop_reason
            self._end(seq)
        elif partial is not None and request_id in self._streamed:
            self._deltas.append(Delta(request_id, self._new_tokens(seq), partial.release()))

    def _new_tokens(self, seq: Sequence) -> tuple[int, ...]:
        request_id = seq.request.request_id
        seen = self._streamed[request_id]
        self._streamed[request_id] = seq.num_output_tokens
        return tuple(seq.token_ids[seq.num_prompt_tokens + seen :])

    def _end_with_error(self, seq: Sequence, code: str, message: str) -> None:
        seq.finish_reason, seq.error_code, seq.error_message = "error", code, message
        self._end(seq)

    def _end(self, seq: Sequence) -> None:
        """Let go of a row's memory and turn it into its completion."""
        request_id = seq.request.request_id
        seq.finished_at = self._clock()
        self.scheduler.remove(seq)
        del self._rows[request_id]
        partial = self._texts.pop(request_id, None)
        completion = self._completion(seq, partial)
        self._ended.append(completion)
        if request_id in self._streamed and partial is not None:
            new_tokens = self._new_tokens(seq)
            self._deltas.append(Delta(request_id, new_tokens, partial.rest(completion.text), completion))
            del self._streamed[request_id]

    def _completion(self, seq: Sequence, partial: PartialText | None) -> Completion:
        request = seq.request
        try:
            text = self._text(seq, partial)
        except Exception as error:
            text = ""
            seq.finish_reason = "error"
            seq.error_code, seq.error_message = _undecodable(error)
        return Completion(
            request_id=request.request_id,
            text=text,
            token_ids=tuple(seq.output_token_ids),
            finish_reason=seq.finish_reason or "abort",
            usage=Usage(seq.num_prompt_tokens, seq.num_output_tokens, seq.num_cached_tokens),
            timings=Timings(seq.queued_at, seq.first_token_at, seq.finished_at, seq.started_at),
            logprobs=tuple(seq.logprobs) if request.sampling.logprobs is not None else None,
            error_code=seq.error_code,
            error_message=seq.error_message,
            stop_reason=seq.stop_reason,
        )

    def _text(self, seq: Sequence, partial: PartialText | None) -> str:
        text = self.tokenizer.decode(text_token_ids(seq))
        if partial is None or seq.finish_reason not in ("stop", "length"):
            return text
        cut = partial.settle(text, seq.num_output_tokens)
        if partial.match is not None:
            seq.finish_reason, seq.stop_reason = "stop", partial.match[1]
        return cut

    def _partial_text(self, request: Request) -> PartialText:
        return PartialText(
            self.tokenizer,
            stop=request.sampling.stop,
            min_tokens=request.sampling.min_tokens,
            byte_token_ids=self.tokenizer.byte_token_ids,
        )


def _undecodable(error: Exception) -> tuple[str, str]:
    """A tokenizer's fault with one row's ids is that row's alone."""
    return "engine_error", f"The output cannot be decoded: {error}"


def build_engine(config: EngineConfig, *, before_step: Callable[[Batch], None] | None = None) -> Engine:
    """Load a model and put an engine over it, and say in one log line what fits.

    Raises ModelLoadError with the reason why the model can't be run, and OutOfMemory with what is needed,
    what there is, and the largest context that would fit.
    """
    # torch and transformers come with these; whoever only holds an Engine, as tests do, needs neither.
    from pagemill.engine.run.load import load_model
    from pagemill.engine.run.pressure import Pressure

    loaded = load_model(config)
    info = loaded.info
    limits = SchedulerConfig(
        num_blocks=info.num_blocks,
        context=info.context,
        max_num_tokens=config.max_num_tokens or DEFAULT_NUM_TOKENS,
        max_num_seqs=config.max_num_seqs or DEFAULT_NUM_SEQS,
        prefix_cache=config.prefix_cache,
        rope_switch=info.rope_switch,
    )
    log.info(describe(info, limits))
    pressure = Pressure(limits.max_num_seqs)
    return Engine(
        loaded.runner, loaded.tokenizer, info, limits, before_step=before_step, rows_allowed=pressure.rows
    )


def describe(model: ModelInfo, limits: SchedulerConfig) -> str:
    """The start-up line: what was loaded, and how much fits."""
    rows = limits.kv_tokens / limits.max_tokens_per_row
    numbers = f"{model.quantization} and {model.dtype}" if model.quantization else model.dtype
    return (
        f"{model.name} ({model.architecture}, {numbers} on {model.device}): {limits.num_blocks} blocks, "
        f"{limits.kv_tokens} tokens of key-value memory; context {limits.context}, "
        f"{min(rows, limits.max_num_seqs):.1f} rows at full context, at most {limits.max_num_seqs} at once"
    )
