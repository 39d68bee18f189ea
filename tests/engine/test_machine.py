"""Random histories of an engine: after every move its books agree, and every row gets its own tokens.

The fake model checks each step that everything a row builds on is in its memory, so a block that is freed
too early, shared wrongly, or evicted under a row shows up here whatever led to it.
"""

from __future__ import annotations

from engine_fakes import FakeRunner, answer, check, fake_engine, request
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagemill.engine.flights import identity
from pagemill.engine.request import Completion, Request

STEMS = [[1 + (stem * 131 + i * 7) % 900 for i in range(200)] for stem in range(3)]

SWITCHES = ("prefix_order", "long_rows_first", "learned_lengths", "identical_rows")


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 24),
        budget=st.sampled_from([1, 2, 15, 16, 17, 40, 200]),
        seqs=st.integers(1, 8),
        cache=st.booleans(),
        context=st.sampled_from([40, 10_000]),
        rope_switch=st.sampled_from([None, 16, 25, 50]),
        switches=st.fixed_dictionaries({name: st.booleans() for name in SWITCHES}),
        late=st.booleans(),
    )
    def build(
        self,
        num_blocks: int,
        budget: int,
        seqs: int,
        cache: bool,
        context: int,
        rope_switch: int | None,
        switches: dict[str, bool],
        late: bool,
    ) -> None:
        self.runner = FakeRunner(num_blocks, rope_switch, keep_batches=False)
        self.engine = fake_engine(
            num_blocks=num_blocks,
            max_num_tokens=budget,
            max_num_seqs=seqs,
            prefix_cache=cache,
            context=context,
            runner=self.runner,
            late=late,
            **switches,
        )
        self.open: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.broken: set[Request] = set()  # identities: who flies with a broken row may get its error
        self.shown: dict[str, list[int]] = {}
        self.texts: dict[str, str] = {}
        self.count = 0

    @rule(
        stem=st.integers(0, 2),
        shared=st.integers(0, 120),
        own=st.lists(st.integers(1, 5), max_size=20),
        max_tokens=st.integers(1, 60),
        seed=st.integers(0, 1),
        salt=st.sampled_from(["", "", "salt"]),
        priorities=st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=4),
        group=st.sampled_from(["", "", "other"]),
        greedy=st.booleans(),
        stream=st.booleans(),
        stop=st.sampled_from([(), ("no such text",)]),
        ends=st.sampled_from([(), (), tuple(range(1, 100))]),
    )
    def submit(
        self,
        stem: int,
        shared: int,
        own: list[int],
        max_tokens: int,
        seed: int,
        salt: str,
        priorities: list[int],
        group: str,
        greedy: bool,
        stream: bool,
        stop: tuple[str, ...],
        ends: tuple[int, ...],
    ) -> None:
        """One row, or several alike but for their priority: then every other one is streamed."""
        ids = [*STEMS[stem][:shared], *own] or [1]
        # The fake model's noise is its seed, greedy or not.
        seed, temperature = (0, 0.0) if greedy else (seed, 1.0)
        for priority in priorities:
            one = request(
                f"r{self.count}", ids, max_tokens, seed=seed, salt=salt, priority=priority, group=group,
                temperature=temperature, stop=stop, stop_token_ids=ends,
            )  # fmt: skip
            stream = not stream
            self.count += 1
            self.engine.add(one, stream=stream)
            self.open[one.request_id] = one
            if stream:
                self.shown[one.request_id] = []
                self.texts[one.request_id] = ""

    @rule(steps=st.integers(1, 30))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.take(self.engine.step())

    @precondition(lambda self: self.open)
    @rule(choice=st.integers(0, 10_000))
    def abort(self, choice: int) -> None:
        name = sorted(self.open)[choice % len(self.open)]
        if self.engine.abort(name):
            self.aborted.add(name)

    @precondition(lambda self: self.open)
    @rule(choice=st.integers(0, 10_000))
    def break_row(self, choice: int) -> None:
        name = sorted(self.open)[choice % len(self.open)]
        self.runner.bad_rows.add(name)
        self.broken.add(identity(self.open[name]))

    @rule(latest=st.integers(1, 3))
    def preempt(self, latest: int) -> None:
        """As if memory had run out: the latest arrivals give way, all but the oldest."""
        scheduler = self.engine.scheduler
        for seq in scheduler._running[1:][-latest:]:
            scheduler._preempt(seq)

    @rule()
    def evict(self) -> None:
        self.engine.scheduler.pool.forget_all()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "engine"):
            check(self.engine)

    def take(self, completions: list[Completion]) -> None:
        for delta in self.engine.take_deltas():
            self.shown[delta.request_id] += delta.token_ids
            self.texts[delta.request_id] += delta.text
        for completion in completions:
            self.judge(self.open.pop(completion.request_id), completion)

    def judge(self, one: Request, completion: Completion) -> None:
        limits = self.engine.limits
        most = limits.max_tokens_per_row
        length = len(one.prompt_token_ids)
        right = answer(one, one.sampling.max_tokens, most)
        got = list(completion.token_ids)
        assert self.shown.pop(one.request_id, got) == got
        assert self.texts.pop(one.request_id, completion.text) == completion.text
        assert completion.usage.completion_tokens == len(got)
        if length + 1 > limits.context or length > limits.kv_tokens:
            assert completion.error_code == "prompt_too_long"
        elif one.request_id in self.aborted:
            assert completion.finish_reason == "abort"
            assert got == right[: len(got)]
        elif identity(one) in self.broken and completion.finish_reason == "error":
            assert completion.error_code == "numeric_error"
            assert got == right[: len(got)]
        else:
            ended = got[-1] in one.sampling.stop_token_ids
            assert completion.finish_reason == ("stop" if ended else "length")
            assert got == right
            assert completion.usage.cached_tokens <= length

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self.take(self.engine.step())
        assert not self.engine.has_work, "The engine does not come to an end."
        assert not self.open
        assert self.engine.scheduler.pool.num_used == 0
        assert not self.engine._flights._open and not self.engine._flights._by_seq
        check(self.engine)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
