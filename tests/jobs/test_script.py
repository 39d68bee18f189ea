"""Scripts survive what happens between client and Redis: lost replies, restarts, failovers, refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from job_steps import MODEL, counts, leased, make_plan, make_record, make_spec, planned_job
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, ConnectionError, ReadOnlyError, ResponseError, TimeoutError

from pagemill.jobs import script
from pagemill.jobs.errors import RedisUnavailable
from pagemill.jobs.script import Scripts, connection, decoded, pairs, source
from pagemill.jobs.state import State
from pagemill.jobs.status import Totals

VERBS = {path.stem for path in Path(script.__file__).with_name("lua").glob("*.lua")} - {"common"}


class LosesReplies:
    """A Redis whose every script runs, and whose first reply to each call is lost on the way."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._lose = True
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._redis, name)

    async def evalsha(self, *args: Any) -> Any:
        reply = await self._redis.evalsha(*args)  # type: ignore[misc]
        self._lose = not self._lose
        if not self._lose:
            self.lost += 1
            raise ConnectionError("Connection closed by server.")
        return reply


class Fails:
    """Awaitable attempts that raise what they are told, one after another, then succeed."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(script, "_LONGEST_PAUSE_S", 0.002)


@pytest.fixture
def nowhere() -> Redis:
    return connection("redis://:secret@127.0.0.1:1/0")


@pytest.mark.usefixtures("quick")
async def test_a_job_runs_to_its_end_although_every_first_reply_is_lost(state: State) -> None:
    faulty = LosesReplies(state.redis)
    away: Any = faulty
    twice = State(away, prefix=state.prefix)
    for verb in VERBS:  # so that each call is an EVALSHA from the first
        await state.redis.script_load(source(verb))
    spec = make_spec()
    await twice.create(spec, "out")
    held = await leased(twice)
    await twice.planned(spec.job, held.fence, make_plan(3, 4, failed=1))
    first, second = await leased(twice), await leased(twice)
    assert (first.shard, second.shard) == (0, 1)
    await twice.seal(spec.job, 0, first.fence, 1, {"key": "a"}, Totals(**counts(2)))
    await twice.committed(spec.job, 0, make_record(0, 3))
    await twice.committed(spec.job, 1, make_record(1, 4))
    held = await leased(twice)
    assert (held.kind, held.attempt) == ("finalize", 1)
    found = await twice.status(spec.job)
    assert found is not None
    assert (found.completed, found.failed, found.shards_done) == (7, 1, 2)
    assert faulty.lost >= 9


async def test_a_server_that_forgot_the_scripts_is_told_again(state: State) -> None:
    job = await planned_job(state, 3)
    await state.redis.script_flush()
    assert await state.status(job) is not None
    await state.redis.script_flush()
    assert len(await state.list_jobs()) == 1


@pytest.mark.parametrize("verb", sorted(VERBS))
async def test_every_script_is_valid_and_says_why_it_may_run_twice(state: State, verb: str) -> None:
    await state.redis.script_load(source(verb))
    text = (Path(script.__file__).with_name("lua") / f"{verb}.lua").read_text()
    head = text[: text.index("\nlocal ") if "\nlocal " in text else text.index("\nreturn ")]
    assert all(line.startswith("--") for line in head.splitlines())
    assert "Twice:" in head or "Reads only" in head
    assert not any(word in text for word in ("'KEYS'", "'SCAN'", "math.random"))


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_script_is_in_the_readme(verb: str) -> None:
    assert f"`{verb}`" in Path(script.__file__).with_name("README.md").read_text()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("reset"),
        TimeoutError("slow"),
        OSError("no route"),
        ReadOnlyError("a replica now"),
        ResponseError("LOADING Redis is loading the dataset in memory"),
        ResponseError("MASTERDOWN Link with MASTER is down"),
        ResponseError("OOM command not allowed when used memory > 'maxmemory'."),
    ],
)
async def test_what_passes_by_itself_is_waited_out(state: State, error: Exception) -> None:
    scripts = Scripts(state.redis, patience_s=5)
    assert await scripts.patiently(Fails(error, error, error)) == "done"


async def test_patience_ends_in_one_sentence_without_the_password(nowhere: Redis) -> None:
    with pytest.raises(RedisUnavailable) as caught:
        await Scripts(nowhere, patience_s=0.1).call("status", "k", "p", 1)
    text = str(caught.value)
    assert text.startswith("Redis at 127.0.0.1:1 does not answer (")
    assert "PAGEMILL_REDIS_URL" in text
    assert text.count("\n") == 0
    assert "secret" not in text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ResponseError("MISCONF Errors writing to the AOF file"), "free space"),
        (ResponseError("OOM command not allowed"), "more memory"),
        (ReadOnlyError("You can't write against a read only replica."), "name the primary"),
        (ResponseError("LOADING Redis is loading the dataset in memory"), "in a moment"),
        (ConnectionError("refused"), "start it"),
    ],
)
async def test_what_did_not_pass_says_how_to_mend_it(state: State, error: Exception, said: str) -> None:
    with pytest.raises(RedisUnavailable, match=said):
        await Scripts(state.redis, patience_s=0).patiently(Fails(error, error))


async def test_connecting_to_nothing_fails_at_once_when_there_is_no_patience(tmp_path: Path) -> None:
    socket = tmp_path / "none.sock"
    with pytest.raises(RedisUnavailable, match="does not answer"):
        await State.connect(f"unix://{socket}", patience_s=0)


@pytest.mark.parametrize("url", ["http://x", "nonsense", "redis://host:port/0", "redis://host/0?foo=1"])
async def test_what_is_no_redis_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(RedisUnavailable, match="is not a Redis address"):
        await State.connect(url)


async def test_a_wrong_password_is_not_tried_again(state: State) -> None:
    attempt = Fails(AuthenticationError("WRONGPASS invalid username-password pair"))
    with pytest.raises(RedisUnavailable, match="user and password"):
        await Scripts(state.redis, patience_s=60).patiently(attempt)


async def test_a_database_that_is_not_there_is_one_sentence(state: State) -> None:
    attempt = Fails(ResponseError("DB index is out of range"))
    with pytest.raises(RedisUnavailable, match="no such database"):
        await Scripts(state.redis, patience_s=60).patiently(attempt)


async def test_our_own_mistakes_are_not_hidden(state: State) -> None:
    attempt = Fails(ResponseError("ERR value is not an integer"))
    with pytest.raises(ResponseError, match="not an integer"):
        await Scripts(state.redis, patience_s=60).patiently(attempt)


async def test_a_redis_that_restarts_is_waited_for_and_nothing_is_lost(redis_server: Any) -> None:
    patient = await State.connect(redis_server.url, patience_s=20)
    try:
        job = await planned_job(patient, 3, 3)
        held = await leased(patient)
        await patient.seal(job, 0, held.fence, 1, {"key": "a"}, Totals(**counts(2)))
        redis_server.kill()
        waiting = asyncio.create_task(patient.status(job))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        redis_server.start()
        found = await waiting
        assert found is not None
        assert (found.completed, found.state) == (2, "in_progress")
        [renewed] = await patient.renew("w1", [(job, held.task, held.fence)], 10_000)
        assert renewed.ok
        assert (await leased(patient)).task == "shard:1"
    finally:
        await patient.close()


async def test_many_calls_share_round_trips_and_keep_their_order(state: State) -> None:
    jobs = [await planned_job(state, 1) for _ in range(3)]
    calls = [(state.key(jobs[n % 3]), (state.prefix, 1000)) for n in range(600)]
    replies = await state.scripts.call_many("status", calls)
    assert len(replies) == 600
    assert all(pairs(reply)["model"] == MODEL for reply in replies)


async def test_a_state_on_a_client_that_decodes_works_the_same(redis_url: str) -> None:
    redis = Redis.from_url(redis_url, decode_responses=True)
    try:
        decoding = State(redis, prefix=make_spec().job)
        job = await planned_job(decoding, 3)
        assert (await leased(decoding)).job == job
        assert await decoding.models() == [MODEL]
        assert [found.job for found in await decoding.list_jobs()] == [job]
        assert (await decoding.events(job))[0].kind == "state"
    finally:
        await redis.aclose()


async def test_the_doctor_learns_what_it_judges_redis_by(state: State) -> None:
    facts = await state.facts()
    assert int(facts.version.split(".")[0]) >= 6
    assert facts.maxmemory_policy == "noeviction"
    assert facts.uptime_seconds >= 0
    assert facts.protocol is None
    await state.check_protocol()
    assert (await state.facts()).protocol == 1


def test_replies_are_decoded_all_the_way_down() -> None:
    assert decoded([b"a", [b"b", 3], {b"k": (b"v",)}, None]) == ["a", ["b", 3], {"k": ["v"]}, None]
    assert pairs(["a", "1", "b", "2"]) == {"a": "1", "b": "2"}
