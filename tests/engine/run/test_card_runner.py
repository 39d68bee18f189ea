"""The runner for a card, over one that is not there: interpreted kernels, copies and graphs as strict as a
card's, and the tokens of the runner for CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_card
import torch
from engine_fakes import check, request
from tiny_card import BLOCKS, CONTEXT
from tiny_models import open_runner, save

from pagemill.engine.engine import Engine
from pagemill.engine.request import Completion, Request
from pagemill.engine.run.card_load import storage_of
from pagemill.engine.run.card_runner import CardRunner
from pagemill.engine.run.runner import ModelRunner
from pagemill.engine.run.sampler import Sampler
from pagemill.engine.run.simulated_card import SimulatedCard
from pagemill.engine.weights.load import load_weights, open_checkpoint
from pagemill.kernels.choice import triton_everywhere

# numpy's, which interprets kernels: rows that fill a graph up are any numbers, NaN too.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
VOCAB, ROWS = 97, 3
STEM = [1 + (7 * i) % (VOCAB - 1) for i in range(70)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_card.one_layer(VOCAB), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A card says nothing of overflow and of NaN; numpy, which interprets kernels, would."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="module")
def on_cpu(path: Path) -> ModelRunner:
    return open_runner(path, num_blocks=BLOCKS)


@pytest.fixture
def card() -> SimulatedCard:
    return SimulatedCard()


@pytest.fixture
def on_card(path: Path, card: SimulatedCard) -> Iterator[CardRunner]:
    with triton_everywhere(), np.errstate(all="ignore"):
        yield card_runner(path, card)


def card_runner(path: Path, card: SimulatedCard, deterministic: bool = False) -> CardRunner:
    """Over memory that is NaN wherever no row has a token."""
    checkpoint = open_checkpoint(path)
    model = load_weights(checkpoint, torch.float32, card.device, deterministic=deterministic)
    storage = storage_of(checkpoint.spec, BLOCKS, torch.float32, card.device)
    storage.tensor.fill_(torch.nan)
    return CardRunner(
        model,
        storage,
        Sampler(frozenset()),
        card,
        max_rows=ROWS,
        context=CONTEXT,
        deterministic=deterministic,
    )


def engine_over(runner: Any, num_blocks: int = BLOCKS, budget: int = 40, **switches: bool) -> Engine:
    engine = tiny_card.engine_over(runner, VOCAB, ROWS, num_blocks=num_blocks, budget=budget, **switches)
    engine.scheduler.admission.growth = lambda seq: 0.0  # type: ignore[method-assign]
    return engine


def run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    done = {}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        done.update({completion.request_id: completion for completion in engine.step()})
        check(engine)
    assert engine.scheduler.pool.num_used == 0
    return done


def same(runner: CardRunner, on_cpu: ModelRunner, requests: list[Request], **limits: Any) -> Engine:
    engine = engine_over(runner, **limits)
    found, expected = run(engine, requests), run(engine_over(on_cpu, **limits), requests)
    for name, completion in expected.items():
        assert found[name].token_ids == completion.token_ids, name
        assert found[name].finish_reason == completion.finish_reason
    return engine


def test_chunks_hits_and_rows_of_every_kind_get_the_tokens_of_a_cpu(
    on_card: CardRunner, on_cpu: ModelRunner, card: SimulatedCard
) -> None:
    rows = [
        request("greedy", STEM[:50], 3, temperature=0.0),
        request("one token", STEM[:1], 4, temperature=0.0),
        request("drawn", [*STEM[:33], 5], 3, seed=3, top_p=0.9, temperature=1.2),
        request("few", [*STEM[:33], 9], 3, seed=4, top_k=7, min_p=0.05),
        request("stopped", STEM[5:12], 9, temperature=0.0, stop_token_ids=tuple(range(0, VOCAB, 3))),
    ]
    same(on_card, on_cpu, rows)
    assert on_card.stats.graphs > 2 and on_card.stats.eager > 2
    assert card.replays == on_card.stats.graphs


def test_what_a_graph_has_no_room_for_gets_the_same_tokens(on_card: CardRunner, on_cpu: ModelRunner) -> None:
    """Penalties look at a token that the host has not seen, and ends are held back by a count of them."""
    rows = [
        request("punished", STEM[:9], 5, temperature=0.0, repetition_penalty=1.8, presence_penalty=0.5),
        request("often", STEM[3:9], 5, temperature=0.0, frequency_penalty=2.0),
        request(
            "late", STEM[:5], 6, temperature=0.0, min_tokens=4, stop_token_ids=tuple(range(0, VOCAB, 2)),
            logit_bias=((8, 1.5),),
        ),
    ]  # fmt: skip
    same(on_card, on_cpu, rows)
    assert on_card.stats.graphs == 0


def test_rows_that_give_way_get_the_same_tokens(on_card: CardRunner, on_cpu: ModelRunner) -> None:
    rows = [request(f"{n}", STEM[n : n + 14], 6, temperature=0.0) for n in range(2)]
    engine = same(on_card, on_cpu, rows, num_blocks=3, prefix_cache=False)
    assert engine.metrics().preemptions > 0


def test_logprobs_are_those_of_a_cpu(on_card: CardRunner, on_cpu: ModelRunner) -> None:
    rows = [
        request("a", STEM[:6], 3, temperature=0.0, logprobs=2),
        request("b", STEM[2:9], 3, temperature=0.0, logprobs=1, frequency_penalty=1.5),
        request("c", STEM[1:9], 3, temperature=0.0),
    ]
    found, expected = run(engine_over(on_card), rows), run(engine_over(on_cpu), rows)
    assert found["c"].logprobs is None
    for name in "ab":
        for ours, theirs in zip(found[name].logprobs or (), expected[name].logprobs or (), strict=True):
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_a_row_with_broken_numbers_ends_alone(on_card: CardRunner, on_cpu: ModelRunner) -> None:
    """Its token is not in the vocabulary's order of things, and goes into the next step all the same."""
    embedding = on_card.decoder.embedding  # type: ignore[attr-defined]
    embedding[VOCAB - 1] = torch.nan
    rows = [
        request("broken", [*STEM[:20], VOCAB - 1, 3, 4], 6, temperature=0.0),
        request("well", STEM[3:8], 6, temperature=0.0, logit_bias=((VOCAB - 1, -1e9),)),
    ]
    found = run(engine_over(on_card, prefix_cache=False), rows)
    assert found["broken"].error_code == "numeric_error" and not found["broken"].token_ids
    assert found["well"].token_ids == run(engine_over(on_cpu), rows[1:])["well"].token_ids


class Small:
    """A model on a card that has memory for steps of so many tokens."""

    def __init__(self, model: Any, most: int) -> None:
        self._model, self.most = model, most
        self.spec = model.spec

    def hidden(self, inputs: Any, storage: Any) -> torch.Tensor:
        if inputs.token_ids.shape[0] > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        hidden: torch.Tensor = self._model.hidden(inputs, storage)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.logits(hidden)
        return logits


def test_a_step_too_large_for_the_card_comes_again_in_smaller_ones(
    on_card: CardRunner, on_cpu: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    on_card.decoder = Small(on_card.decoder, 12)
    rows = [request(f"{n}", STEM[n : n + 25], 4, temperature=0.0) for n in range(3)]
    engine = same(on_card, on_cpu, rows)
    assert engine.scheduler.allowance.tokens == 10
    assert any("too large for the device" in record.message for record in caplog.records)


def test_a_row_that_no_step_is_small_enough_for_has_an_error_of_its_own(on_card: CardRunner) -> None:
    on_card.decoder = Small(on_card.decoder, 0)
    found = run(engine_over(on_card), [request("a", STEM[:5], 4), request("b", STEM[:3], 4)])
    assert {completion.error_code for completion in found.values()} == {"engine_error"}
    assert "no memory" in (found["a"].error_message or "")


@pytest.mark.usefixtures("rows_one_by_one")
def test_with_deterministic_a_rows_numbers_are_the_same_to_the_last_bit(
    path: Path, card: SimulatedCard, on_cpu: ModelRunner
) -> None:
    """Alone, and in chunks beside others, with a preemption: log-probabilities show what tokens would not."""
    row = request("row", STEM[:14], 4, temperature=0.0, logprobs=2)
    others = [
        request("first", STEM[3:17], 4, temperature=0.0),
        request("plain", STEM[:14], 4, temperature=0.0),
    ]
    with triton_everywhere(), np.errstate(all="ignore"):
        runner = card_runner(path, card, deterministic=True)
        alone = run(engine_over(runner, prefix_cache=False), [row])["row"]
        engine = engine_over(runner, num_blocks=3, budget=9, prefix_cache=False)
        beside = run(engine, [others[0], row, others[1]])
    assert engine.metrics().preemptions > 0
    assert beside["row"].logprobs == alone.logprobs
    assert beside["plain"].token_ids == alone.token_ids
    assert alone.token_ids == run(engine_over(on_cpu), [row])["row"].token_ids
    assert runner.stats.graphs > 0


# What the simulated card is strict about


def test_words_must_stay_while_they_are_copied(card: SimulatedCard) -> None:
    words, there = card.host_words(4), torch.zeros(4, dtype=torch.int32)
    card.send(words, there)
    fetch = card.fetch([there])
    words[0] = 7
    with pytest.raises(AssertionError, match="being copied"):
        fetch.wait()


def test_a_result_is_what_it_was_when_its_step_ended(card: SimulatedCard) -> None:
    numbers = torch.ones(2)
    fetch = card.fetch([numbers])
    numbers.zero_()
    assert fetch.wait()[0].tolist() == [1, 1]


def test_nothing_in_a_graph_waits_for_the_card(card: SimulatedCard) -> None:
    numbers = torch.ones(2)
    with pytest.raises(AssertionError, match="waits for the device"):
        card.capture(lambda: print(numbers.sum().item()), None)
    graph = card.capture(lambda: numbers.add_(1), None)
    graph.replay()
    assert numbers.tolist() == [3, 3]
