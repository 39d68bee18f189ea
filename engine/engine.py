"""The engine: requests in, one step at a time, completions out.

It joins the scheduler (which row computes what), the runner (tensors) and the decoder (text), and holds
what belongs to none of them: who is in flight, and how each row ended. It is used from one thread; the
asyncio side and the thread are in stream.py. It never waits for anything but the runner.

How far ahead of its results it goes is the runner's `depth`. With 1, a step is scheduled and begun while the
one before it runs, and then that one's result is read:

    host    schedule and begin 1 | schedule and begin 2 | read and book 1 | schedule and begin 3 | read ...
    device                         1 .................................... 2 ........................... 3
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagemill.engine.batch import Batch, ReadResult, Runner, StepResult
from pagemill.engine.config import (
    DEFAULT_NUM_SEQS,
    DEFAULT_NUM_TOKENS,
    EngineConfig,
    ModelInfo,
    SchedulerConfig,
)
from pagemill.engine.detokenize import PartialText
from pagemill.engine.errors import StepTooLarge
from pagemill.engine.finish import Refusal, ending, refusal, text_token_ids
from pagemill.engine.flights import Flight, Flights, Rider
from pagemill.engine.metrics import EngineMetrics, Meter
from pagemill.engine.request import Completion, Delta, FinishReason, Request, Timings, Usage
from pagemill.engine.schedule.scheduler import Scheduler
from pagemill.engine.sequence import Sequence, Status

if TYPE_CHECKING:
    from pagemill.engine.run.card import Card
    from pagemill.engine.tokenizer import Tokenizer
    from pagemill.engine.weights.load import Checkpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step whose result nobody has read. schedule_s, begin_s: seconds that it has taken so far."""

    batch: Batch
    read: ReadResult
    schedule_s: float
    begin_s: float


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
        self.runner = runner
        self._clock = clock
        self._begun: deque[_Begun] = deque()
        self._arrivals = 0
        self._flights = Flights(share=limits.identical_rows)
        self._ended: list[Completion] = []
        self._deltas: list[Delta] = []
        self._meter = Meter(limits.max_num_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self._flights or self._ended or self._begun)

    @property
    def num_steps(self) -> int:
        return self._meter.steps

    def add(self, request: Request, *, stream: bool = False) -> None:
        """Take a request in. One that can never run becomes an error completion of the next step.

        stream: collect its tokens as they come, for `take_deltas`.
        Raises ValueError when a request of that id is in flight.
        """
        if request.request_id in self._flights:
            raise ValueError(f"A request {request.request_id!r} is already in flight.")
        refused = refusal(request, self.model_info, self.limits)
        if refused is not None:
            self._refuse(request, refused, stream=stream)
            return
        text = self._partial_text(request) if stream else None
        rider = Rider(request, self._arrivals, self._clock(), text)
        self._arrivals += 1
        joined = self._flights.join(rider)
        if joined is None:
            self._begin(rider)
        else:
            self.scheduler.promote(joined.seq, request.priority)

    def abort(self, request_id: str) -> bool:
        """End a request now, waiting or running; False when it is not in flight (any more)."""
        flight = self._flights.with_request(request_id)
        if flight is None:
            return False
        self._part(flight, flight.riders[request_id], self._completion(flight, "abort"))
        return True

    def abort_all(self) -> None:
        for flight in self._flights:
            for request_id in list(flight.riders):
                self.abort(request_id)

    def request_ids(self, batch: Batch) -> list[str]:
        """Whom a batch computes for, and the steps before it that may still run; identical requests share one
        of its sequences."""
        batches = [*(step.batch for step in self._begun), batch]
        rows = dict.fromkeys(seq for each in batches for seq in each.sequences)
        going = (seq for seq in rows if seq.status is not Status.FINISHED)
        return [name for seq in going for name in self._flights.of(seq).riders]

    def step(self) -> list[Completion]:
        """Begin a batch, read one if that leaves more unread than the runner's depth, or nothing could be
        begun, and return every row that has ended since the last step."""
        started = self._clock()
        if self.rows_allowed is not None:
            self.scheduler.max_num_seqs = min(self.rows_allowed(), self.limits.max_num_seqs)
        batch = self.scheduler.schedule()
        if batch.sequences:
            self._begin_step(batch, started)
        if self._begun and (len(self._begun) > self.runner.depth or not batch.sequences):
            self._finish_step(self._begun.popleft())
        ended, self._ended = self._ended, []
        self._meter.finished += len(ended)
        return ended

    def _begin_step(self, batch: Batch, started: float) -> None:
        scheduled = self._clock()
        for seq in batch.sequences:
            if seq.started_at is None:
                seq.started_at = scheduled
        if self.before_step is not None:
            self.before_step(batch)
        try:
            read = self.runner.begin(batch)
        except StepTooLarge as error:
            self._shrink(batch, error)
            return
        self.scheduler.begun(batch)
        self._begun.append(_Begun(batch, read, scheduled - started, self._clock() - scheduled))

    def _finish_step(self, step: _Begun) -> None:
        waited = self._clock()
        result = step.read()
        now = self._clock()
        self._meter.step(step.batch, result, step.schedule_s, step.begin_s + now - waited, now)
        self._book(step.batch, result, now)
        self._meter.finish_s += self._clock() - now

    def _shrink(self, batch: Batch, error: StepTooLarge) -> None:
        """Nothing of the batch has happened. Its rows come again in smaller steps, of one token at least."""
        self.scheduler.allowance.failed(batch.num_tokens)
        log.warning(
            "A step of %d tokens in %d rows was too large for the device (%s); steps have %d tokens at most.",
            batch.num_tokens,
            len(batch.sequences),
            error,
            self.scheduler.allowance.tokens,
        )
        if batch.num_tokens == 1:
            message = f"The device has no memory to compute one token of this row: {error}"
            self._end_with_error(self._flights.of(batch.sequences[0]), "engine_error", message)

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
        self._begun.clear()
        for flight in self._flights:
            # What a step left half done is not touched: giving memory back could raise, and helps nobody.
            flight.seq.status = Status.FINISHED
            self._end_with_error(flight, "engine_error", message, again=False)
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
            identical_rows=self._flights.joined,
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
            if seq.status is Status.FINISHED:
                continue  # while the step ran: what it made of this row is wasted
            flight = self._flights.of(seq)
            if not result.finite[i]:
                self._end_with_error(
                    flight,
                    "numeric_error",
                    "The model's output for this row is not a finite number (NaN or Inf).",
                )
                continue
            if not batch.samples(i):
                continue
            token = result.token_ids[i]
            if token is None:
                raise RuntimeError("The runner gave no token for a row whose tokens are all computed.")
            seq.token_ids.append(token)
            logprob = result.logprobs[i]
            if logprob is not None:
                seq.logprobs.append(logprob)
            if seq.first_token_at is None:
                seq.first_token_at = now
            self._after_token(flight)

    def _after_token(self, flight: Flight) -> None:
        """End the row if its new token ends it; pass on what streamed requests have to show."""
        seq = flight.seq
        try:
            match = flight.stop_match()
        except Exception as error:
            self._end_with_error(flight, *_undecodable(error))
            return
        end = ending(seq, self.model_info.eos_token_ids, self.limits.max_tokens_per_row, match)
        if end is not None:
            seq.finish_reason, seq.stop_reason = end.reason, end.stop_reason
            self._end(flight)
            return
        for rider in list(flight.riders.values()):
            try:
                delta = rider.delta(seq.output_token_ids)
            except Exception as error:  # of this rider's text: the others' is their own
                code, message = _undecodable(error)
                completion = self._completion(flight, "error")
                self._part(flight, rider, replace(completion, error_code=code, error_message=message))
                continue
            if delta is not None:
                self._deltas.append(delta)

    def _refuse(self, request: Request, refused: Refusal, *, stream: bool) -> None:
        """Answer a request that no row can be made of; nothing in it is trusted to be what it should."""
        now = self._clock()
        prompt = request.prompt_token_ids
        completion = Completion(
            request_id=request.request_id,
            text="",
            token_ids=(),
            finish_reason="error",
            usage=Usage(len(prompt) if isinstance(prompt, tuple) else 0, 0),
            timings=Timings(now, finished=now),
            error_code=refused.code,
            error_message=refused.message,
        )
        self._ended.append(completion)
        if stream:
            self._deltas.append(Delta(request.request_id, completion=completion))

    def _begin(self, rider: Rider, *, failed: Sequence | None = None) -> None:
        stops = rider.request.sampling.stop
        text = self._partial_text(rider.request) if stops else None
        self.scheduler.add(self._flights.begin(rider, text, failed=failed).seq)

    def _end_with_error(self, flight: Flight, code: str, message: str, *, again: bool = True) -> None:
        seq = flight.seq
        seq.finish_reason, seq.error_code, seq.error_message = "error", code, message
        self._end(flight, again=again)

    def _end(self, flight: Flight, *, again: bool = True) -> None:
        """Let go of a row's memory and answer its riders.

        A row that failed has failed one of them. The others run again, each on its own, so that nobody's
        answer depends on who came with the same question; of it they keep what they have shown already.
        """
        now = self._clock()
        self.scheduler.remove(flight.seq)
        completion = self._completion(flight, flight.seq.finish_reason or "abort")
        first, *others = flight.riders.values()
        self._answer(flight, first, completion, now)
        for rider in others:
            if completion.finish_reason == "error" and again:
                self._flights.leave(rider.request.request_id)
                self._begin(rider, failed=flight.seq)
            else:
                self._answer(flight, rider, completion, now)

    def _part(self, flight: Flight, rider: Rider, completion: Completion) -> None:
        """Answer one rider; the row goes on for the others, if there are any."""
        self._answer(flight, rider, completion, self._clock())
        if not flight.riders:
            self.scheduler.remove(flight.seq)

    def _answer(self, flight: Flight, rider: Rider, completion: Completion, now: float) -> None:
        """Turn the flight's completion into the rider's, who leaves."""
        own = rider.completion(completion, flight.seq, flight.take_hits(rider), now)
        self._flights.leave(own.request_id)
        self._ended.append(own)
        if rider.text is not None:
            self._deltas.append(rider.last_delta(own))

    def _completion(self, flight: Flight, reason: FinishReason) -> Completion:
        """What the row has come to, but for what is each rider's own."""
        seq = flight.seq
        stop, code, message = seq.stop_reason, seq.error_code, seq.error_message
        try:
            text = self.tokenizer.decode(text_token_ids(seq))
            if flight.text is not None and reason in ("stop", "length"):
                text = flight.text.settle(text, seq.num_output_tokens)
                if flight.text.match is not None:
                    reason, stop = "stop", flight.text.match[1]
        except Exception as error:
            text, reason = "", "error"
            code, message = _undecodable(error)
        return Completion(
            request_id=seq.request.request_id,
            text=text,
            token_ids=tuple(seq.output_token_ids),
            finish_reason=reason,
            usage=Usage(seq.num_prompt_tokens, seq.num_output_tokens),
            timings=Timings(0.0),
            logprobs=tuple(seq.logprobs) if seq.request.sampling.logprobs is not None else None,
            error_code=code,
            error_message=message,
            stop_reason=stop,
        )

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


def build_engine(
    config: EngineConfig,
    *,
    before_step: Callable[[Batch], None] | None = None,
    card: Card | None = None,
    checkpoint: Checkpoint | None = None,
) -> Engine:
    """Load a model and put an engine over it, and say in one log line what fits.

    card, checkpoint: see load_model (engine/run/load.py).
    Raises ModelLoadError with the reason why the model can't be run, and OutOfMemory with what is needed,
    what there is, and the largest context that would fit.
    """
    # torch and transformers come with these; whoever only holds an Engine, as tests do, needs neither.
    from pagemill.engine.run.load import load_model
    from pagemill.engine.run.pressure import Pressure

    loaded = load_model(config, card, checkpoint)
    info = loaded.info
    limits = SchedulerConfig(
        num_blocks=info.num_blocks,
        context=info.context,
        max_num_tokens=loaded.max_num_tokens or DEFAULT_NUM_TOKENS,
        max_num_seqs=loaded.max_num_seqs or DEFAULT_NUM_SEQS,
        prefix_cache=config.prefix_cache,
        prefix_order=config.prefix_order,
        long_rows_first=config.long_rows_first,
        learned_lengths=config.learned_lengths,
        identical_rows=config.identical_rows,
        rope_switch=info.rope_switch,
    )
    log.info(describe(info, limits))
    # What a card holds it has taken beforehand; on a CPU memory is had when it is first touched.
    rows_allowed = Pressure(limits.max_num_seqs).rows if info.device == "cpu" else None
    return Engine(
        loaded.runner, loaded.tokenizer, info, limits, before_step=before_step, rows_allowed=rows_allowed
    )


def describe(model: ModelInfo, limits: SchedulerConfig) -> str:
    """The start-up line: what was loaded, and how much fits."""
    rows = limits.kv_tokens / limits.max_tokens_per_row
    numbers = f"{model.quantization} and {model.dtype}" if model.quantization else model.dtype
    memory = f" in {model.kv_cache_dtype}" if model.kv_cache_dtype else ""
    return (
        f"{model.name} ({model.architecture}, {numbers} on {model.device}): {limits.num_blocks} blocks, "
        f"{limits.kv_tokens} tokens of key-value memory{memory}; context {limits.context}, "
        f"{min(rows, limits.max_num_seqs):.1f} rows at full context, at most {limits.max_num_seqs} at once"
    )
