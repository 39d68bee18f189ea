"""A model that can be checked: it stands where the real runner stands, and remembers what it was told.

`FakeRunner` keeps, for each memory slot, a digest of the whole token history up to that slot. Before a row
computes anything it looks up every earlier token of that row in its blocks: a wrong block, a slot that was
never written, or memory that another row wrote over is an AssertionError. The next token is a function of
the history, so a row's answer does not depend on how it was scheduled.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pagemill.engine.batch import Batch, ReadResult, Runner, StepResult
from pagemill.engine.config import BLOCK_SIZE, ModelInfo, SchedulerConfig
from pagemill.engine.engine import Engine
from pagemill.engine.request import Completion, Request, SamplingParams, TokenLogprob
from pagemill.engine.sequence import Sequence as Row

VOCAB = 1000
EOS = 0


def digest(history: int, token: int) -> int:
    return hash((history, token))


def history(token_ids: Iterable[int], salt: str = "") -> int:
    value = zlib.crc32(salt.encode())
    for token in token_ids:
        value = digest(value, token)
    return value


def next_token(token_ids: Sequence[int], seed: int = 0) -> int:
    """What the fake model says after these tokens: anything but EOS."""
    return 1 + hash((history(token_ids), seed)) % (VOCAB - 1)


def answer(request: Request, length: int, most: int | None = None) -> list[int]:
    """The tokens that a request must get, computed without any engine."""
    ids = list(request.prompt_token_ids)
    for _ in range(length if most is None else min(length, most - len(ids))):
        ids.append(next_token(ids, request.seed))
        if ids[-1] in request.sampling.stop_token_ids:
            break
    return ids[len(request.prompt_token_ids) :]


@dataclass
class FakeRunner:
    """next: tokens so far and seed -> token. bad_rows: request ids whose results are not finite.

    rope_switch: rows of more tokens have other keys, as the scheduler must have noticed.
    """

    num_blocks: int
    rope_switch: int | None = None
    next: Callable[[Sequence[int], int], int] = next_token
    bad_rows: set[str] = field(default_factory=set)
    batches: list[Batch] = field(default_factory=list)
    computed: dict[str, int] = field(default_factory=dict)  # request id -> tokens computed in all
    keep_batches: bool = True
    broken: set[Row] = field(default_factory=set)  # have run while they were bad

    def __post_init__(self) -> None:
        self.memory: list[int | None] = [None] * (self.num_blocks * BLOCK_SIZE)

    depth = 0

    def begin(self, batch: Batch) -> ReadResult:
        result = self.execute(batch)
        return lambda: result

    def execute(self, batch: Batch) -> StepResult:
        assert len(set(map(id, batch.sequences))) == len(batch.sequences), "A row is in the batch twice."
        assert all(n >= 1 for n in batch.num_scheduled)
        if self.keep_batches:
            self.batches.append(batch)
        histories = [self._read(seq) for seq in batch.sequences]
        written: set[int] = set()
        for seq, count, value in zip(batch.sequences, batch.num_scheduled, histories, strict=True):
            self._write(seq, count, value, written)
        tokens: list[int | None] = []
        for i, seq in enumerate(batch.sequences):
            bad = seq.request.request_id in self.bad_rows
            sampled = batch.samples(i) and not bad
            tokens.append(self.next(seq.token_ids, seq.request.seed) if sampled else None)
        return StepResult(
            token_ids=tuple(tokens),
            finite=tuple(seq.request.request_id not in self.bad_rows for seq in batch.sequences),
            logprobs=tuple(
                TokenLogprob(token, -0.5)
                if token is not None and seq.request.sampling.logprobs is not None
                else None
                for seq, token in zip(batch.sequences, tokens, strict=True)
            ),
        )

    def _read(self, seq: Row) -> int:
        """Check that memory holds everything before what is to be computed; the digest of it."""
        outgrown = self.rope_switch is not None and len(seq.token_ids) > self.rope_switch
        assert seq.long_rope is outgrown, f"Row {seq.request.request_id} has the wrong kind of keys."
        value = history((), f"{seq.request.cache_salt} {seq.long_rope}")
        for position in range(seq.num_computed_tokens):
            value = digest(value, seq.token_ids[position])
            # A row that has broken may be in the next step already, before anybody knows; that is wasted.
            assert seq in self.broken or self.memory[self._slot(seq, position)] == value, (
                f"Row {seq.request.request_id}: position {position} is not in its memory."
            )
        return value

    def _write(self, seq: Row, count: int, value: int, written: set[int]) -> None:
        end = seq.num_computed_tokens + count
        assert end <= len(seq.token_ids)
        for position in range(seq.num_computed_tokens, end):
            value = digest(value, seq.token_ids[position])
            slot = self._slot(seq, position)
            assert slot not in written, "Two rows write one slot in one step."
            written.add(slot)
            # NaN is what a broken row leaves behind; whoever reads it finds no history.
            self.memory[slot] = None if seq.request.request_id in self.bad_rows else value
        name = seq.request.request_id
        if name in self.bad_rows:
            self.broken.add(seq)
        self.computed[name] = self.computed.get(name, 0) + count

    @staticmethod
    def _slot(seq: Row, position: int) -> int:
        return seq.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


class Late:
    """A runner over another whose results come a step late, as on a device that runs while the host goes on.

    What it has drawn it keeps to itself until the result is read: only for the other runner, and only while
    that computes, are those tokens among a row's. Results are to be read in the order of the steps.
    """

    depth = 1

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.unread: deque[tuple[Batch, StepResult]] = deque()

    def begin(self, batch: Batch) -> ReadResult:
        assert len(self.unread) <= self.depth, "A step too many was begun."
        drawn = {seq: self._drawn(seq) for seq in batch.sequences}
        for seq, tokens in drawn.items():
            assert len(tokens) == seq.num_unread_tokens
            seq.token_ids += tokens
            seq.num_unread_tokens = 0
        result = self.runner.begin(batch)()
        for seq, tokens in drawn.items():
            seq.num_unread_tokens = len(tokens)
            del seq.token_ids[len(seq.token_ids) - len(tokens) :]
        self.unread.append((batch, result))
        return lambda: self._read(batch)

    def _drawn(self, seq: Row) -> list[int]:
        tokens = []
        for batch, result in self.unread:
            for i, row in enumerate(batch.sequences):
                if row is seq and batch.samples(i):
                    # Of a row that is broken a device has drawn something, and nobody minds what.
                    tokens.append(1 if result.token_ids[i] is None else result.token_ids[i])
        return tokens

    def _read(self, batch: Batch) -> StepResult:
        oldest, result = self.unread.popleft()
        assert oldest is batch, "Results are read out of order."
        return result


class FakeTokenizer:
    """Token n is the text "<n> "; EOS is special and skipped."""

    byte_token_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{token}> " for token in token_ids if token != EOS)


class ByteTokenizer:
    """Token n is byte n, as in a byte-level vocabulary: characters are spread over tokens."""

    byte_token_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")


def model_info(num_blocks: int = 64, context: int = 10_000) -> ModelInfo:
    return ModelInfo(
        name="fake",
        fingerprint="fake",
        architecture="fake",
        dtype="float32",
        device="cpu",
        context=context,
        vocab_size=VOCAB,
        num_blocks=num_blocks,
        kv_tokens=num_blocks * BLOCK_SIZE,
        eos_token_ids=frozenset({EOS}),
    )


class Clock:
    """Time that passes only when asked: a thousandth of a second a look."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def __call__(self) -> float:
        return next(self._ticks) / 1000


def fake_engine(
    *,
    num_blocks: int = 64,
    max_num_tokens: int = 64,
    max_num_seqs: int = 16,
    prefix_cache: bool = True,
    context: int = 10_000,
    runner: FakeRunner | None = None,
    tokenizer: object | None = None,
    late: bool = False,
    **switches: bool,
) -> Engine:
    """late: results come a step late. switches: other fields of SchedulerConfig."""
    runner = runner or FakeRunner(num_blocks)
    limits = SchedulerConfig(
        num_blocks=num_blocks,
        context=context,
        max_num_tokens=max_num_tokens,
        max_num_seqs=max_num_seqs,
        prefix_cache=prefix_cache,
        rope_switch=runner.rope_switch,
        **switches,
    )
    return Engine(
        Late(runner) if late else runner,
        tokenizer or FakeTokenizer(),  # type: ignore[arg-type]
        model_info(num_blocks, context),
        limits,
        clock=Clock(),
    )


def request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    seed: int = 0,
    salt: str = "",
    priority: int = 0,
    group: str = "",
    **sampling: object,
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        seed=seed,
        cache_salt=salt,
        priority=priority,
        group=group,
    )


def prompt(length: int, first: int = 1) -> list[int]:
    """`length` tokens that differ for each `first`."""
    return [1 + (first * 31 + i * 7) % (VOCAB - 1) for i in range(length)]


def check(engine: Engine) -> None:
    """The engine's pool, queue and rows agree with one another."""
    engine.scheduler.check(flight.seq for flight in engine._flights)


def run_all(engine: Engine, requests: Iterable[Request], most_steps: int = 100_000) -> dict[str, Completion]:
    """Run to the end, checking the engine after each step; afterwards it must be empty."""
    for one in requests:
        engine.add(one)
    done: dict[str, Completion] = {}
    for _ in range(most_steps):
        if not engine.has_work:
            break
        for completion in engine.step():
            assert completion.request_id not in done
            done[completion.request_id] = completion
        check(engine)
    assert not engine.has_work, f"Not done after {most_steps} steps."
    assert engine.scheduler.pool.num_used == 0
    assert engine.scheduler.num_waiting == engine.scheduler.num_running == 0
    return done
