"""The engine in its thread: consumers of every kind, and what becomes of them when something ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from engine_fakes import FakeRunner, answer, check, fake_engine, prompt, request

from pagemill.engine.batch import Batch, StepResult
from pagemill.engine.errors import EngineFailed
from pagemill.engine.request import Completion, Request
from pagemill.engine.stream import AsyncEngine


class Gate(FakeRunner):
    """A runner whose steps wait until the test lets them pass."""

    def __init__(self, num_blocks: int = 64) -> None:
        super().__init__(num_blocks)
        self.open = threading.Event()
        self.entered = threading.Event()

    def execute(self, batch: Batch) -> StepResult:
        self.entered.set()
        assert self.open.wait(30)
        return super().execute(batch)


class Breaking(FakeRunner):
    """A runner whose n-th step raises."""

    def __init__(self, after: int) -> None:
        super().__init__(64)
        self.after = after

    def execute(self, batch: Batch) -> StepResult:
        self.after -= 1
        if self.after < 0:
            raise RuntimeError("the device is gone")
        return super().execute(batch)


def rows(count: int, max_tokens: int = 6) -> list[Request]:
    return [request(f"r{n}", prompt(10 + n, n), max_tokens) for n in range(count)]


async def idle(engine: AsyncEngine) -> None:
    """Until the engine has let go of everything."""
    while engine.engine.has_work:
        await asyncio.sleep(0.001)


async def test_a_submitted_request_gets_its_completion() -> None:
    async with AsyncEngine(fake_engine()) as engine:
        completions = await asyncio.gather(*(engine.submit(one) for one in rows(20)))
    for one, completion in zip(rows(20), completions, strict=True):
        assert list(completion.token_ids) == answer(one, 6)


@pytest.mark.parametrize("ahead", [1, 3, None])
@pytest.mark.parametrize("kind", ["iterable", "async"])
async def test_generate_yields_every_completion_as_it_finishes(kind: str, ahead: int | None) -> None:
    async def source() -> AsyncIterator[Request]:
        for one in rows(40):
            await asyncio.sleep(0)
            yield one

    async with AsyncEngine(fake_engine()) as engine:
        requests = source() if kind == "async" else rows(40)
        done = {c.request_id: c async for c in engine.generate(requests, ahead=ahead)}
    assert {name: list(c.token_ids) for name, c in done.items()} == {
        r.request_id: answer(r, 6) for r in rows(40)
    }


async def test_generate_of_nothing_ends() -> None:
    async with AsyncEngine(fake_engine()) as engine:
        assert [c async for c in engine.generate([])] == []


async def test_generate_takes_no_more_than_it_may_be_ahead() -> None:
    taken = 0

    def source() -> Iterator[Request]:
        nonlocal taken
        for one in rows(50):
            taken += 1
            yield one

    async with AsyncEngine(fake_engine()) as engine:
        yielded = 0
        async for _ in engine.generate(source(), ahead=4):
            yielded += 1
            assert taken <= yielded + 4
    assert yielded == 50


async def test_a_source_that_raises_is_raised_to_its_consumer_alone() -> None:
    def source() -> Iterator[Request]:
        yield request("mine", prompt(4), 1000)
        raise OSError("the file is gone")

    async with AsyncEngine(fake_engine()) as engine:
        with pytest.raises(OSError, match="the file is gone"):
            async for _ in engine.generate(source()):
                pass
        await idle(engine)
        assert (await engine.submit(request("other", prompt(4), 2))).finish_reason == "length"


async def test_a_source_that_raises_after_everything_is_done_is_raised_too() -> None:
    consumed = asyncio.Event()

    async def source() -> AsyncIterator[Request]:
        yield request("mine", prompt(4), 2)
        await consumed.wait()
        raise OSError("the file is gone")

    async with AsyncEngine(fake_engine()) as engine:
        generator = engine.generate(source())
        assert (await anext(generator)).request_id == "mine"
        consumed.set()
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="the file is gone"):
            await anext(generator)


async def test_a_stream_is_the_completion_in_pieces() -> None:
    async with AsyncEngine(fake_engine()) as engine:
        deltas = [delta async for delta in engine.stream(request("a", prompt(4), 30))]
    completion = deltas[-1].completion
    assert completion is not None
    assert "".join(delta.text for delta in deltas) == completion.text
    assert [token for delta in deltas for token in delta.token_ids] == list(completion.token_ids)


async def test_a_slow_reader_gets_several_tokens_at_once_and_holds_up_nobody() -> None:
    async with AsyncEngine(fake_engine()) as engine:
        stream = engine.stream(request("slow", prompt(4), 200))
        first = await anext(stream)
        await engine.submit(request("other", prompt(4), 300))  # longer than the stream, which nobody reads
        rest = [delta async for delta in stream]
    assert len(rest) == 1, "What was not read was merged."
    assert len(first.token_ids) + len(rest[0].token_ids) == 200


@pytest.mark.parametrize("how", ["break", "cancel", "drop"])
async def test_a_consumer_that_leaves_is_aborted_and_the_others_go_on(how: str) -> None:
    engine = AsyncEngine(fake_engine(num_blocks=4096))
    await engine.start()
    endless = [request(f"e{n}", prompt(4, n), 50_000 // 16) for n in range(3)]

    async def consume() -> None:
        async for delta in engine.stream(endless[0]):
            if how == "break" and delta.token_ids:
                break

    async def wait_for(future: asyncio.Future[Completion]) -> None:
        await future

    other = engine.submit(request("other", prompt(9), 50))
    if how == "drop":
        generator = engine.generate(endless)
        feeding = asyncio.ensure_future(anext(generator))
        await asyncio.sleep(0.01)
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        del generator, feeding
    else:
        task = asyncio.create_task(consume())
        waiter = asyncio.create_task(wait_for(engine.submit(endless[1])))
        await asyncio.sleep(0.01)
        if how == "cancel":
            task.cancel()
        waiter.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)
    assert list((await other).token_ids) == answer(request("other", prompt(9), 50), 50)
    await idle(engine)
    assert engine.healthy
    check(engine.engine)
    assert engine.engine.scheduler.pool.num_used == 0
    await engine.close()


async def test_abort_gives_what_there_is() -> None:
    runner = Gate()
    async with AsyncEngine(fake_engine(runner=runner)) as engine:
        future = engine.submit(request("a", prompt(4), 1000))
        await asyncio.to_thread(runner.entered.wait)
        engine.abort("a")
        engine.abort("unknown")
        runner.open.set()
        completion = await future
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) >= 1


async def test_an_id_is_taken_until_its_completion_is_delivered() -> None:
    async with AsyncEngine(fake_engine()) as engine:
        first = engine.submit(request("a", prompt(4), 50))
        with pytest.raises(ValueError, match="already in flight"):
            engine.submit(request("a", prompt(4), 50))
        await first
        engine.abort("a")  # too late for the first, and not for the second
        assert (await engine.submit(request("a", prompt(4), 50))).finish_reason == "length"


async def test_whoever_ends_aborts_no_later_request_of_the_same_id() -> None:
    async with AsyncEngine(fake_engine()) as engine:
        again: list[asyncio.Future[Completion]] = []
        async for delta in engine.stream(request("a", prompt(20), 4)):
            if delta.completion is not None:
                again.append(engine.submit(request("a", prompt(20, 2), 200)))
        generator = engine.generate([request("p", prompt(20), 2), request("q", prompt(20, 5), 2)])
        await anext(generator)
        while "q" in engine._callers:  # until it is delivered, and not read
            await asyncio.sleep(0.001)
        again.append(engine.submit(request("q", prompt(20, 3), 200)))
        await generator.aclose()
        assert [c.finish_reason for c in await asyncio.gather(*again)] == ["length", "length"]


async def test_generate_takes_an_id_again_once_it_has_ended() -> None:
    ended = asyncio.Event()

    async def source() -> AsyncIterator[Request]:
        for n in range(3):
            ended.clear()
            yield request("a", prompt(20, n), 2)
            await ended.wait()

    async with AsyncEngine(fake_engine()) as engine:
        seen = []
        async for completion in engine.generate(source()):
            seen.append(completion.request_id)
            ended.set()
    assert seen == ["a"] * 3


async def test_a_failing_step_fails_every_outstanding_row_and_shows() -> None:
    engine = AsyncEngine(fake_engine(max_num_seqs=2, runner=Breaking(after=3)))
    await engine.start()
    completions = await asyncio.gather(*(engine.submit(one) for one in rows(6, max_tokens=100)))
    assert {c.error_code for c in completions} == {"engine_error"}
    assert "the device is gone" in (completions[0].error_message or "")
    assert not engine.healthy
    assert isinstance(engine.failure, RuntimeError)
    with pytest.raises(EngineFailed, match="the device is gone"):
        engine.submit(request("late", prompt(4)))
    await engine.close()


async def test_generate_tells_of_a_failing_step() -> None:
    engine = AsyncEngine(fake_engine(runner=Breaking(after=2)))
    await engine.start()
    seen: list[Completion] = []
    with pytest.raises(EngineFailed):
        async for completion in engine.generate(rows(30, max_tokens=100), ahead=4):
            seen.append(completion)
    # As many as were submitted by then, and none of the others.
    assert 1 <= len(seen) <= 4 and {c.error_code for c in seen} == {"engine_error"}
    await engine.close()


async def test_closing_aborts_what_is_outstanding() -> None:
    engine = AsyncEngine(fake_engine(num_blocks=4096))
    await engine.start()
    futures = [engine.submit(one) for one in rows(20, max_tokens=10_000)]
    await engine.close()
    completions = await asyncio.gather(*futures)
    assert {c.finish_reason for c in completions} == {"abort"}
    assert not engine.healthy and engine.failure is None
    with pytest.raises(EngineFailed, match="closed"):
        engine.submit(request("late", prompt(4)))
    await engine.close()


async def test_closing_during_a_step_gives_each_what_it_had_produced() -> None:
    runner = Gate()
    runner.open.set()
    engine = AsyncEngine(fake_engine(runner=runner))
    await engine.start()
    future = engine.submit(request("submitted", prompt(20), 500))
    stream = engine.stream(request("streamed", prompt(20, 4), 500))
    deltas = [await anext(stream)]
    runner.open.clear()
    runner.entered.clear()
    await asyncio.to_thread(runner.entered.wait)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)  # it has begun, and the step is still running
    runner.open.set()
    await closing
    deltas += [delta async for delta in stream]
    completion, streamed = await future, deltas[-1].completion
    assert streamed is not None
    for one in (completion, streamed):
        assert one.finish_reason == "abort" and len(one.token_ids) >= 1
    assert [token for delta in deltas for token in delta.token_ids] == list(streamed.token_ids)
    assert not engine.engine.has_work and engine.engine.scheduler.pool.num_used == 0


async def test_an_engine_that_was_not_started_says_so() -> None:
    engine = AsyncEngine(fake_engine())
    assert not engine.healthy
    with pytest.raises(EngineFailed, match="not been started"):
        engine.submit(request("a", prompt(4)))
    await engine.start()
    with pytest.raises(RuntimeError, match="started already"):
        await engine.start()
    await engine.close()


def test_an_event_loop_that_disappears_ends_the_thread() -> None:
    engine = AsyncEngine(fake_engine(num_blocks=4096))

    async def start() -> None:
        await engine.start()
        engine.submit(request("a", prompt(4), 5_000))

    asyncio.run(start())
    assert engine._thread is not None
    engine._thread.join(30)
    assert not engine._thread.is_alive()


async def test_metrics_are_a_recent_snapshot() -> None:
    async with AsyncEngine(fake_engine()) as engine:
        await asyncio.gather(*(engine.submit(one) for one in rows(5)))
        async with asyncio.timeout(30):
            while engine.metrics().finished < 5:
                await asyncio.sleep(0.01)
        assert engine.metrics().generated_tokens == 30
